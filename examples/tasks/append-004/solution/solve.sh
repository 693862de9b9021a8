#!/bin/sh
echo sonu >> vaze.txt
