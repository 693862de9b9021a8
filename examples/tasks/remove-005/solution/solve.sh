#!/bin/sh
rm dike.txt
