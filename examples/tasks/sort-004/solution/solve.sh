#!/bin/sh
sort rone.txt > kede.txt
