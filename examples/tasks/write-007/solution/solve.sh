#!/bin/sh
echo keze > reba.txt
