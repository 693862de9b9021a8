#!/bin/sh
rm soba.txt
