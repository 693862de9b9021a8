#!/bin/sh
touch zivi.txt
