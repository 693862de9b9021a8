#!/bin/sh
echo boma > delo.txt
