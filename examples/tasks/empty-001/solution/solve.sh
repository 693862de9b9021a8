#!/bin/sh
touch gero.txt
