#!/bin/sh
mkdir sano
