#!/bin/sh
echo lodu > voma.txt
