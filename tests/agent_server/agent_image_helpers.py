"""What the tests of images ask of a server's trials."""

from __future__ import annotations

from pathlib import Path

from agent_server_helpers import Server

from miles_core.verdicts import VerdictKind

SAY = "#!/bin/bash\n{}\necho 1 > /logs/verifier/reward.txt\n"
ID = "RUN cat /proc/sys/kernel/random/uuid > /app/id\n"
"""Tells one build from another."""


def said(server: Server, task: str, agent: str = "nop") -> str:
    """What the verifier of a trial prints."""
    result = server.run(task, agent)
    assert result.verdict.kind is VerdictKind.GRADED, result.verdict
    (output,) = (server.trials / result.trial_id).rglob("test-stdout.txt")
    return output.read_text(errors="replace")


def kept(server: Server) -> set[Path]:
    return {path for path in (server.trials / ".images").iterdir() if path.name[0] != "."}
