#!/bin/sh
sort nupe.txt > kase.txt
