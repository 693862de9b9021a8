#!/bin/sh
wc -l < rene.txt > lipa.txt
