#!/bin/sh
head -n 1 kazu.txt > gona.txt
