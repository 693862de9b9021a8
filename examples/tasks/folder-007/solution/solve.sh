#!/bin/sh
mkdir fiku
