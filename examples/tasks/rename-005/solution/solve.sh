#!/bin/sh
mv mive.txt napa.txt
