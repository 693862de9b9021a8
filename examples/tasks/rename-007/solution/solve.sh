#!/bin/sh
mv buve.txt mupo.txt
