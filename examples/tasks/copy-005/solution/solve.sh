#!/bin/sh
cp kide.txt kana.txt
