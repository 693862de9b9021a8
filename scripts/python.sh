#!/bin/sh
# Prints a Python >= 3.8 that really runs (a version manager's shim may not).
for python in python3 /usr/bin/python3 /usr/local/bin/python3 \
    python3.11 python3.12 python3.13 "$HOME"/.pyenv/versions/3.*/bin/python3; do
    if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 8))' 2>/dev/null; then
        echo "$python"
        exit 0
    fi
done
echo "setup: no working python3 found. Install Python 3.11 and 3.12 with their venv modules." >&2
exit 1
