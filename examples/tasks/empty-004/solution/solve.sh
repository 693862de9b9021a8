#!/bin/sh
touch vodu.txt
