#!/bin/sh
sort zuza.txt > lezo.txt
