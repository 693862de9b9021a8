#!/bin/sh
rm susa.txt
