#!/bin/sh
cp sezi.txt pume.txt
