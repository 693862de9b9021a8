#!/bin/sh
wc -l < defu.txt > pugu.txt
