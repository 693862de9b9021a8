#!/bin/sh
cp sira.txt soki.txt
