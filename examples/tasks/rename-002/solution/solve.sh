#!/bin/sh
mv lofi.txt pepa.txt
