#!/bin/sh
head -n 1 tuni.txt > resu.txt
