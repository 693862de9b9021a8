#!/bin/sh
mkdir mazi
