#!/bin/sh
sort doku.txt > galo.txt
