#!/bin/sh
mkdir zedi
