#!/bin/sh
head -n 1 fifu.txt > rivi.txt
