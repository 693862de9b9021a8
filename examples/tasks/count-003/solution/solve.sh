#!/bin/sh
wc -l < zovi.txt > baba.txt
