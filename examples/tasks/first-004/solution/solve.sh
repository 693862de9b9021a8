#!/bin/sh
head -n 1 giro.txt > rete.txt
