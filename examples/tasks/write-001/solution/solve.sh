#!/bin/sh
echo teka > zire.txt
