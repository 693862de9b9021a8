#!/bin/sh
# Runs lint, then the tests of both environments side by side: either keeps about one core busy.
# Usage: scripts/test.sh [default|all]
set -eu
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false

case "${1:-default}" in
    default) trainer="not slow and not agent_env"; agent="agent_env and not slow" ;;
    all) trainer="not agent_env"; agent="agent_env" ;;
    *) echo "usage: scripts/test.sh [default|all]" >&2; exit 2 ;;
esac

scripts/lint.sh

log="$(mktemp)"
.venv-agent/bin/python -m pytest -o cache_dir=.pytest_cache/agent -m "$agent" \
    tests/agent_server tests/modelinit/test_modelinit_agent.py \
    tests/sessions/test_session_clients_*.py >"$log" 2>&1 &
agent_tests=$!
trap 'kill "$agent_tests" 2>/dev/null || true; rm -f "$log"' EXIT
trap 'exit 130' INT TERM

failed=""
echo "== tests in .venv; those in .venv-agent run beside them and are shown after them"
.venv/bin/python -m pytest -m "$trainer" || failed=" .venv"
echo "== tests in .venv-agent"
wait "$agent_tests" || failed="$failed .venv-agent"
cat "$log"
if [ -n "$failed" ]; then
    echo "Tests failed in:$failed" >&2
    exit 1
fi
echo "All checks passed: lint, tests in .venv, tests in .venv-agent."
