#!/bin/sh
mkdir mova
