#!/bin/sh
wc -l < zoza.txt > bova.txt
