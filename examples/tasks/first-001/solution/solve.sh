#!/bin/sh
head -n 1 zupu.txt > tubu.txt
