#!/bin/sh
mkdir budu
