#!/bin/sh
echo vage >> puta.txt
