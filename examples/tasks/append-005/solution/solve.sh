#!/bin/sh
echo bara >> dika.txt
