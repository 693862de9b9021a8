"""Ends of trials that are hard to tell apart: each has one cause, and no reward is made up."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("harbor")
from agent_scripted_model import DONE, ScriptedModel, bash  # noqa: E402
from agent_server_helpers import CHECK, TOML, Server, make_task  # noqa: E402

from miles_core.verdicts import Cause, VerdictKind  # noqa: E402

pytestmark = pytest.mark.agent_env

MINI = "mini-swe-agent"
REWARD = "/logs/verifier/reward.txt"


def run_mini(server: Server, script: list, task: str, **fields):
    """A trial of mini-swe-agent against a script."""
    model = ScriptedModel(script)
    try:
        return server.run(task, MINI, base_url=model.url, **fields)
    finally:
        model.close()


def processes_of(pid: int) -> list[int]:
    """A process's descendants, the nearest first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found, todo = [], [pid]
    while todo:
        below = children.get(todo.pop(0), [])
        found += below
        todo += below
    return found


def end_sandbox(server: Server) -> int:
    """Kill the process that holds the only sandbox of a server, once there is one."""
    for _ in range(600):
        for pid in processes_of(server.pid):
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if command[0] == b"bwrap" and b"--as-pid-1" in command:
                os.kill(pid, signal.SIGKILL)
                return pid
        time.sleep(0.05)
    raise AssertionError("no sandbox")


@pytest.mark.parametrize("where", ["solution", "tests"])
def test_sandbox_that_dies_gives_no_verdict(server: Server, tasks: Path, where: str) -> None:
    scripts = {"solve": "#!/bin/bash\ntrue\n", "test": CHECK}
    scripts["solve" if where == "solution" else "test"] = (
        "#!/bin/bash\necho 1 > /logs/verifier/reward.txt\nsleep 20\n"
    )
    make_task(tasks, f"dies-{where}", **scripts)
    ending = threading.Timer(2.0, end_sandbox, [server])
    ending.start()
    result = server.run(f"dies-{where}")
    ending.join()
    assert (result.verdict.kind, result.reward) == (VerdictKind.NO_VERDICT, None), result.verdict
    assert result.verdict.cause is Cause.SANDBOX_FAILED, result.verdict


def test_sandbox_that_dies_under_an_agent(server: Server) -> None:
    ended: list[int] = []

    def kill(body: dict) -> dict:
        ended.extend([] if ended else [end_sandbox(server)])
        return bash("true")

    result = run_mini(server, [bash("echo 42 > answer.txt"), kill], "answer")
    assert (result.verdict.kind, result.reward) == (VerdictKind.NO_VERDICT, None), result.verdict
    assert result.verdict.cause is Cause.SANDBOX_FAILED, result.verdict


LATE = {
    "slow": ("sleep 20", Cause.VERIFIER_TIMEOUT),
    "silent": ("true", Cause.REWARD_MISSING),
    "words": (f"echo passed > {REWARD}", Cause.REWARD_INVALID),
}


@pytest.mark.parametrize("kind", sorted(LATE))
def test_end_of_an_agent_hides_no_verifier(server: Server, tasks: Path, kind: str) -> None:
    """Harbor records the agent's exception alone; the cause is the verifier's all the same."""
    script, cause = LATE[kind]
    make_task(tasks, f"late-{kind}", test=f"#!/bin/bash\n{script}\n", agent_s=2, verifier_s=1)
    result = run_mini(server, [bash("sleep 30")], f"late-{kind}")
    assert result.reward is None and result.verdict.cause is cause, result.verdict


def test_an_agent_that_knows_no_skills_is_not_given_a_task_with_some(
    server: Server, tasks: Path
) -> None:
    make_task(
        tasks,
        "skilled",
        toml=TOML + 'skills_dir = "/skills"\n',
        dockerfile="FROM debian:12-slim\nRUN mkdir /skills\nWORKDIR /app\n",
    )
    result = run_mini(server, [DONE], "skilled")
    assert result.verdict.cause is Cause.SANDBOX_UNSUPPORTED
    assert "does not support skills" in result.verdict.detail
    assert server.run("skilled").reward == 1.0
