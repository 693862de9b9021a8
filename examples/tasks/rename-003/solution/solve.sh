#!/bin/sh
mv mudu.txt guzo.txt
