#!/bin/sh
echo rape >> mefa.txt
