#!/bin/sh
touch nepe.txt
