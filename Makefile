# Miles Flow. `make help` lists the targets.
.DEFAULT_GOAL := help
.PHONY: help setup quickstart test test-all lint lock clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

setup:  ## make or update .venv and .venv-agent, install missing system packages
	@python="$$(scripts/python.sh)" && "$$python" scripts/setup.py

quickstart: setup  ## train a small agent for a few steps on this machine
	@.venv/bin/miles train --preset quickstart --new

test: setup  ## lint and the default tests, in both environments
	@scripts/test.sh default

test-all: setup  ## lint and all tests, the slow ones too
	@scripts/test.sh all

lint: setup  ## style, types and import rules
	@scripts/lint.sh

lock:  ## pin what the environments hold now in locks/
	@python="$$(scripts/python.sh)" && "$$python" scripts/setup.py lock

clean:  ## delete the environments and caches; runs/ stays
	rm -rf .venv .venv-agent build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	rm -rf .hypothesis miles_flow.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
