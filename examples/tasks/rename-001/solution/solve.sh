#!/bin/sh
mv pimo.txt dipe.txt
