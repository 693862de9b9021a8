#!/bin/sh
mv zanu.txt rife.txt
