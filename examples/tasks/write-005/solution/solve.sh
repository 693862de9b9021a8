#!/bin/sh
echo guga > gade.txt
