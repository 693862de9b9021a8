#!/bin/sh
rm nelo.txt
