#!/bin/sh
echo vuki >> firo.txt
