#!/bin/sh
cp sufu.txt vati.txt
