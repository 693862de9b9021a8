#!/bin/sh
echo fize >> mido.txt
