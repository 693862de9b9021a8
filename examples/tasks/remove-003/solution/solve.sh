#!/bin/sh
rm maba.txt
