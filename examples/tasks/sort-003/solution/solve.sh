#!/bin/sh
sort papi.txt > gisu.txt
