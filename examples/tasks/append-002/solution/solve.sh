#!/bin/sh
echo fema >> tevu.txt
