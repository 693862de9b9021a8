#!/bin/sh
rm sovi.txt
