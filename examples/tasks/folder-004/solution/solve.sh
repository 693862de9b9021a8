#!/bin/sh
mkdir fabi
