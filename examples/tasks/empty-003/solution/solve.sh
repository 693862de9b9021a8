#!/bin/sh
touch rozu.txt
