#!/bin/sh
head -n 1 bage.txt > base.txt
