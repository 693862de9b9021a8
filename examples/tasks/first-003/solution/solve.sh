#!/bin/sh
head -n 1 gapi.txt > nola.txt
