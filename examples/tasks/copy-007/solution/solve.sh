#!/bin/sh
cp nona.txt zisu.txt
