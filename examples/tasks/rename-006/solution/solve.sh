#!/bin/sh
mv sasi.txt bare.txt
