#!/bin/sh
sort bene.txt > rutu.txt
