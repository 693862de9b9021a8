#!/bin/sh
wc -l < doge.txt > rata.txt
