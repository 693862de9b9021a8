"""The built-in agent `probe` in real sandboxes: what it sees, measures and leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from agent_server_helpers import TOML, Server, make_task

from miles_core.agent_server.protocol import FORGED_REWARD, TrialResult
from miles_core.verdicts import Cause

pytestmark = pytest.mark.agent_env

SILENT = "#!/bin/bash\nls -la /logs/verifier\nexit 0\n"
USER = TOML.replace("[agent]\n", '[agent]\nuser = "nobody"\n')
HINT = {"Dockerfile": "FROM debian:12-slim\nWORKDIR /app\nCOPY hint /root/private/hint\n"}


def findings(result: TrialResult) -> dict[str, Any]:
    assert result.agent_metrics.probe is not None, result.verdict
    return result.agent_metrics.probe


@pytest.mark.parametrize("forge", ["files", "links", "folders", "processes"])
def test_no_forged_reward_is_taken_from_a_silent_verifier(server: Server, forge: str) -> None:
    make_task(server.tasks, f"probe-silent-{forge}", test=SILENT)
    result = server.run(f"probe-silent-{forge}", "probe", forge=forge)
    assert findings(result)["forged"] > 10
    assert result.reward is None
    assert result.verdict.cause in (Cause.REWARD_MISSING, Cause.VERIFIER_FAILED)


def test_a_verifier_that_reads_the_agents_file_shows(server: Server) -> None:
    test = "#!/bin/bash\ncp /app/deep/score.txt /logs/verifier/reward.txt\n"
    make_task(server.tasks, "probe-reads", test=test)
    assert server.run("probe-reads", "probe").reward == FORGED_REWARD


def test_it_sees_what_the_agents_user_may_read(server: Server) -> None:
    dockerfile = HINT["Dockerfile"] + "RUN chmod 700 /root/private && chmod 777 /app\n"
    for name, toml in (("probe-root", TOML), ("probe-nobody", USER)):
        task = make_task(server.tasks, name, toml=toml, dockerfile=dockerfile)
        (task / "environment/hint").write_text("look: echo 42 > /app/answer.txt\n")
    seen = findings(server.run("probe-root", "probe"))["findings"]
    assert seen == ["the content of solution/solve.sh is in /root/private/hint"]
    report = findings(server.run("probe-nobody", "probe"))
    assert report["findings"] == []
    assert report["forged"] > 10


def test_it_may_be_told_not_to_look(server: Server) -> None:
    dockerfile = "FROM debian:12-slim\nCOPY Dockerfile /tests/\n"
    make_task(server.tasks, "probe-look", dockerfile=dockerfile)
    report = findings(server.run("probe-look", "probe"))
    assert report["findings"] == ["the agent can read /tests"]
    assert findings(server.run("probe-look", "probe", look=False))["findings"] == []


def test_a_trial_tells_the_space_that_it_used(server: Server) -> None:
    script = "#!/bin/bash\nhead -c 3000000 /dev/zero > /srv/data\n"
    script += "bash -c 'x=$(head -c 20000000 /dev/zero | tr \"\\0\" x); echo ${#x}'\n"
    make_task(server.tasks, "probe-space", solve=script)
    metrics = server.run("probe-space", "oracle").agent_metrics
    assert metrics.disk_bytes is not None
    assert 3_000_000 <= metrics.disk_bytes < 5_000_000
    limits = server.call(lambda client: client.health()).limits
    if limits["memory"].startswith("cgroup"):
        assert metrics.memory_peak_bytes is not None
        assert 20_000_000 < metrics.memory_peak_bytes < 200_000_000


def test_other_agents_report_no_findings(server: Server, tasks: Path) -> None:
    assert server.run("answer", "nop").agent_metrics.probe is None
