#!/bin/sh
# Runs lint and the tests in both environments. Usage: scripts/test.sh [default|all]
set -eu
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false

case "${1:-default}" in
    default) trainer="not slow and not agent_env"; agent="agent_env and not slow" ;;
    all) trainer="not agent_env"; agent="agent_env" ;;
    *) echo "usage: scripts/test.sh [default|all]" >&2; exit 2 ;;
esac

scripts/lint.sh
echo "== tests in .venv"
.venv/bin/python -m pytest -m "$trainer"
echo "== tests in .venv-agent"
.venv-agent/bin/python -m pytest -m "$agent" \
    tests/agent_server tests/modelinit/test_modelinit_agent.py tests/sessions/test_session_clients_*.py
echo "All checks passed: lint, tests in .venv, tests in .venv-agent."
