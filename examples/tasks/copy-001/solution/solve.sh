#!/bin/sh
cp lufa.txt gopo.txt
