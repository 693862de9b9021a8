"""What an agent leaves running: its work when it ended by itself, gone when its time was up."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("harbor")
from agent_scripted_model import DONE, ScriptedModel, bash, error, text  # noqa: E402
from agent_server_helpers import CHECK, TOML, Server, make_task  # noqa: E402

from miles_core.agent_server.clients import arguments  # noqa: E402
from miles_core.agent_server.sandbox import processes  # noqa: E402
from miles_core.verdicts import Cause  # noqa: E402

pytestmark = pytest.mark.agent_env

FORGER = (
    "setsid sh -c 'while :; do echo 1 > /logs/verifier/reward.txt; done' "
    ">/dev/null 2>&1 </dev/null &"
)
COUNT = """#!/bin/bash
echo 0 > /logs/verifier/reward.txt
sleep 0.5
ps -eo args
pgrep -f 'name=started' >/dev/null && echo 0.5 > /logs/verifier/reward.txt
exit 0
"""
"""The reward is 0; 0.5 when what the task's own health check started is there."""
SERVED = """#!/bin/bash
pgrep -f name=served >/dev/null && r=1 || r=0
echo $r > /logs/verifier/reward.txt
"""


def daemon(name: str) -> str:
    return f"setsid sh -c 'while :; do sleep 1; done # name={name}' >/dev/null 2>&1 </dev/null &"


def typed(line: str, wait: float = 0.2) -> dict[str, Any]:
    """An answer that types a line, and waits for `wait` seconds."""
    commands = [{"keystrokes": line + "\n", "duration": wait}]
    return text(json.dumps({"analysis": "", "plan": "", "commands": commands}))


def last_output(server: Server) -> str:
    path = max(server.trials.glob("*/harbor/*/verifier/test-stdout.txt"), key=os.path.getmtime)
    return path.read_text()


@pytest.fixture(scope="module")
def hasty(tasks: Path) -> str:
    """A task whose agent has little time and whose health check starts a daemon."""
    check = f"""[environment.healthcheck]
command = '''{daemon("started")}'''
retries = 2
"""
    make_task(tasks, "hasty", test=COUNT, toml=TOML + check, agent_s=3.0)
    return "hasty"


@pytest.mark.parametrize("agent", ["mini-swe-agent", "terminus-2"])
def test_nothing_of_an_agent_out_of_time_is_beside_the_verifier(
    server: Server, hasty: str, agent: str
) -> None:
    last = f"{daemon('left')} sleep 60"
    is_mini = agent == "mini-swe-agent"
    script = [bash(FORGER), bash(last)] if is_mini else [typed(FORGER), typed(last, 60.0)]
    model = ScriptedModel(script)
    try:
        result = server.run(hasty, agent, base_url=model.url)
    finally:
        model.close()
    assert result.verdict.cause is Cause.AGENT_TIMEOUT, result.verdict
    listed = last_output(server)
    assert "reward.txt" not in listed and "name=left" not in listed, listed
    assert "tmux" not in listed and "fork_agents" not in listed, listed
    assert "name=started" in listed and result.reward == 0.5, listed


@pytest.mark.parametrize("agent", ["mini-swe-agent", "terminus-2"])
def test_a_server_that_an_agent_leaves_is_its_work(server: Server, tasks: Path, agent: str) -> None:
    make_task(tasks, "serve", test=SERVED)
    if agent == "mini-swe-agent":
        script = [bash(daemon("served")), bash(DONE)]
    else:
        end = json.dumps({"analysis": "", "plan": "", "commands": [], "task_complete": True})
        script = [typed(daemon("served")), text(end), text(end)]
    model = ScriptedModel(script)
    try:
        result = server.run("serve", agent, base_url=model.url)
    finally:
        model.close()
    assert (result.reward, result.verdict.cause) == (1.0, None), result.verdict


@pytest.mark.parametrize(
    ("last", "cause"),
    [
        (bash("echo more"), Cause.TURN_LIMIT),
        (error(400, "context_length_exceeded"), Cause.TOKEN_BUDGET),
        (text("no action"), Cause.MALFORMED_ACTIONS),
    ],
)
def test_a_limit_of_turns_or_tokens_is_an_end_like_any_other(
    server: Server, tasks: Path, last: Any, cause: Cause
) -> None:
    """The agent is not at work then, and what it left running may be what it was asked for."""
    make_task(tasks, "serve", test=SERVED)
    model = ScriptedModel([bash(daemon("served")), last])
    turns = 2 if cause is Cause.TURN_LIMIT else None
    try:
        result = server.run("serve", "mini-swe-agent", base_url=model.url, max_turns=turns)
    finally:
        model.close()
    assert (result.reward, result.verdict.cause) == (1.0, cause), result.verdict


def test_a_crowd_that_an_agent_leaves_is_no_work(server: Server, tasks: Path) -> None:
    make_task(tasks, "crowd", test=CHECK + "ps -eo args\n")
    many = "for i in $(seq 300); do setsid sleep 77 >/dev/null 2>&1 </dev/null & done"
    model = ScriptedModel([bash(f"{many}; echo 42 > /app/answer.txt"), bash(DONE)])
    try:
        result = server.run("crowd", "mini-swe-agent", base_url=model.url)
    finally:
        model.close()
    assert result.reward == 1.0, result.verdict
    assert "ps -eo args" in last_output(server) and "sleep 77" not in last_output(server)


def test_only_what_is_in_the_namespace_and_not_spared_is_ended() -> None:
    """A first process with children of its own, in a pid namespace made for it."""
    left = "setsid sleep 300 & setsid sh -c 'sleep 301 & sleep 302 & wait' &"
    command = ["unshare", "--pid", "--fork", "--kill-child", "sh", "-c"]
    script = f"{left} while :; do sleep 303; done"
    holder = subprocess.Popen([*command, script], start_new_session=True)
    outside = subprocess.Popen(["sleep", "300"], start_new_session=True)
    try:
        end = time.monotonic() + 20
        lines: dict[str, processes.Member] = {}
        while not {f"sleep {n}" for n in (300, 301, 302)} <= set(lines):
            assert time.monotonic() < end, lines
            time.sleep(0.01)
            (init,) = processes.descendants(holder.pid)[:1] or (0,)
            lines = {" ".join(arguments(member[0])): member for member in processes.members(init)}
        shell = next(member for line, member in lines.items() if line.endswith("wait"))
        processes.end_members(init, frozenset([shell]))
        left = {pid for pid, _ in processes.members(init)}
        assert left == {shell[0], *processes.descendants(shell[0])} and len(left) == 3
        assert outside.poll() is None and Path(f"/proc/{init}").exists()
    finally:
        for process in (holder, outside):
            process.kill()
            process.wait()
