#!/bin/sh
echo rome > gisi.txt
