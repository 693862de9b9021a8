#!/bin/sh
wc -l < veru.txt > tutu.txt
