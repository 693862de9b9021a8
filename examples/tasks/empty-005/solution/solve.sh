#!/bin/sh
touch veko.txt
