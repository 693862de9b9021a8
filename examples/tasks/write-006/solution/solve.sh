#!/bin/sh
echo kiki > fuda.txt
