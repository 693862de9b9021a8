#!/bin/sh
cp sefe.txt kara.txt
