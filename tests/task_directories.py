"""Task directories for the tests of several parts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

TOML = """schema_version = "1.4"
[agent]
timeout_sec = {agent_s}
[verifier]
timeout_sec = {verifier_s}
[environment]
workdir = "/app"
network_mode = "no-network"
memory_mb = 512
storage_mb = 64
"""
DOCKERFILE = "FROM debian:12-slim\nWORKDIR /app\n"


def check_of(answer: str) -> str:
    """A test.sh that wants /app/answer.txt to hold an answer."""
    return f"""#!/bin/bash
if [ "$(cat /app/answer.txt 2>/dev/null)" = "{answer}" ]; then r=1; else r=0; fi
echo $r > /logs/verifier/reward.txt
"""


def solution_of(answer: str) -> str:
    """A solve.sh that writes it."""
    return f"#!/bin/bash\necho {answer} > /app/answer.txt\n"


CHECK = check_of("42")
SOLVE = solution_of("42")


def make_task(
    root: Path,
    name: str,
    *,
    test: str = CHECK,
    solve: str | None = SOLVE,
    instruction: str = "Write 42 into /app/answer.txt\n",
    dockerfile: str = DOCKERFILE,
    toml: str = TOML,
    agent_s: float = 60.0,
    verifier_s: float = 30.0,
    files: Mapping[str, str] | None = None,
) -> Path:
    """A task directory, with other `files` too; the default task wants the answer 42."""
    task = root / name
    text = toml.replace("{agent_s}", str(agent_s)).replace("{verifier_s}", str(verifier_s))
    content = {
        "task.toml": text,
        "instruction.md": instruction,
        "environment/Dockerfile": dockerfile,
        "tests/test.sh": test,
        **({"solution/solve.sh": solve} if solve is not None else {}),
        **(files or {}),
    }
    for path, body in content.items():
        (task / path).parent.mkdir(parents=True, exist_ok=True)
        (task / path).write_text(body)
    return task
