#!/bin/sh
rm bami.txt
