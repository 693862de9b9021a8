#!/bin/sh
touch bifa.txt
