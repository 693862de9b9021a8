#!/bin/sh
wc -l < fegu.txt > zife.txt
