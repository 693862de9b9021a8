#!/bin/sh
# Style, types and the rules of who may import whom.
set -eu
cd "$(dirname "$0")/.."
echo "== ruff"
.venv/bin/ruff check .
.venv/bin/ruff format --check .
echo "== mypy"
.venv/bin/mypy
echo "== import rules"
.venv/bin/lint-imports
