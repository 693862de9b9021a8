#!/bin/sh
sort game.txt > kike.txt
