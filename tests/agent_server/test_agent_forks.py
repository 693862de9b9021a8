"""The agent as a fork of a process outside: as confined as what is started inside."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("harbor")
from agent_scripted_model import DONE, ScriptedModel, bash, text  # noqa: E402
from agent_server_helpers import TOML, Server, make_task  # noqa: E402

from miles_core.agent_server.protocol import TrialResult  # noqa: E402
from miles_core.agent_server.sandbox import processes  # noqa: E402
from miles_core.verdicts import Cause, VerdictKind  # noqa: E402

pytestmark = pytest.mark.agent_env

MINI = "mini-swe-agent"
PR_SET_CHILD_SUBREAPER = 36
AGENT = "$PPID"
"""The pid of the agent, to the shell of one of its commands."""


def outputs(server: Server, commands: list[str], task: str = "answer") -> list[str]:
    model = ScriptedModel([*[bash(command) for command in commands], bash(DONE)])
    try:
        result = server.run(task, MINI, base_url=model.url)
    finally:
        model.close()
    assert result.agent_metrics.turns == len(commands) + 1, result.verdict
    return [m["content"] for m in model.requests[-1]["messages"] if m["role"] == "tool"]


def forker(server: Server, program: str = "fork_agents.py") -> int | None:
    """The helper process of a server that runs `program`."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            stat = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if any(word.endswith(program.encode()) for word in words) and words[0] != b"bwrap":
            parent = Path(f"/proc/{stat[1]}/stat")
            if parent.exists() and int(parent.read_text().rpartition(")")[2].split()[1]) == (
                server.pid
            ):
                return int(entry.name)
    return None


def spawners(server: Server) -> list[int]:
    """The processes that start the commands of the sandboxes: forks that became nothing else."""
    pid = forker(server, "fork_commands.py")
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [
        int(child)
        for child in children
        if b"fork_commands.py" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Server]:
    make_task(tmp_path / "tasks", "answer")
    made = Server(tmp_path, tmp_path / "tasks", "--max-concurrent", "2")
    yield made
    if made.process is not None and made.process.poll() is None:
        made.stop()


def test_the_agent_is_confined_like_its_commands(server: Server) -> None:
    names = "^(Uid|Gid|CapInh|CapPrm|CapEff|CapBnd|CapAmb|NoNewPrivs)"
    words, agent, command, spaces, cgroup = outputs(
        server,
        [
            f"cat /proc/{AGENT}/cmdline",
            f"grep -E '{names}' /proc/{AGENT}/status",
            f"grep -E '{names}' /proc/self/status",
            "for n in user mnt pid net ipc uts; do readlink /proc/self/ns/$n; done",
            f"diff /proc/{AGENT}/cgroup /proc/self/cgroup && echo same",
        ],
    )
    assert "fork_agents.py" in words
    assert "NoNewPrivs:\t1" in agent and "CapAmb:\t0000000000000000" in agent
    assert agent == command
    here = {os.readlink(f"/proc/self/ns/{name}") for name in os.listdir("/proc/self/ns")}
    assert spaces.count(":[") == 6 and not here & set(re.findall(r"\w+:\[\d+\]", spaces))
    assert "same" in cgroup


def test_the_agent_runs_as_the_user_of_the_task(server: Server, tasks: Path) -> None:
    toml = TOML.replace("[agent]\n", '[agent]\nuser = "daemon"\n')
    dockerfile = "FROM debian:12\nRUN usermod -a -G tape,audio daemon\nENV PLACE=here\nWORKDIR /app"
    make_task(tasks, "as-daemon", toml=toml, dockerfile=dockerfile)
    ids, agent, env = outputs(
        server,
        [
            "id -u; id -g; id -Gn | tr ' ' '\\n' | sort | tr '\\n' ' '",
            f"grep -E '^(CapEff|CapPrm)' /proc/{AGENT}/status",
            "echo $PLACE $HOME $PWD; env | cut -d= -f1 | sort | tr '\\n' ' '",
        ],
        "as-daemon",
    )
    assert ids.split()[-5:] and {"audio", "daemon", "tape"} <= set(ids.split()), ids
    assert agent.count("0000000000000000") == 2, agent
    assert "here /usr/sbin /app" in env and "MSWEA" not in env and "PYTHON" not in env, env


def test_an_agent_of_another_user_needs_no_file_of_its_code(own: Server) -> None:
    """The directories of its Python and packages may be closed to that user; all is loaded."""
    toml = TOML.replace("[agent]\n", '[agent]\nuser = "nobody"\n')
    make_task(own.tasks, "as-nobody", toml=toml)
    model = ScriptedModel([bash("sleep 1; id -un"), text("no call"), bash(DONE)])
    try:
        result = own.run("as-nobody", MINI, base_url=model.url)
    finally:
        model.close()
    assert result.agent_metrics.turns == 3 and result.reward == 0.0, result.verdict
    assert "nobody" in str(model.requests[-1]["messages"])


def test_loaded_code_that_ends_is_loaded_again(own: Server) -> None:
    """The agent that runs meanwhile goes on; the next one is a fork of what is loaded anew."""
    first = forker(own)
    assert first is not None
    model = ScriptedModel([bash("sleep 3"), bash("echo 42 > answer.txt"), bash(DONE)])
    results = []
    running = threading.Thread(
        target=lambda: results.append(own.run("answer", MINI, base_url=model.url))
    )
    running.start()
    end = time.monotonic() + 30
    while not model.requests and time.monotonic() < end:
        time.sleep(0.05)
    os.kill(first, signal.SIGKILL)
    running.join(40)
    model.close()
    assert results[0].reward == 1.0, results[0].verdict
    again = ScriptedModel([bash("echo 42 > answer.txt"), bash(DONE)])
    try:
        assert own.run("answer", MINI, base_url=again.url).reward == 1.0
    finally:
        again.close()
    assert forker(own) not in (None, first)


def started(server: Server, seconds: float, results: list[TrialResult]) -> threading.Thread:
    """A trial of oracle that is asleep in its sandbox; its result will be in `results`."""
    name = f"sleeps-{seconds}"
    make_task(server.tasks, name, solve=f"#!/bin/bash\nsleep {seconds}\necho 42 > answer.txt\n")
    running = threading.Thread(target=lambda: results.append(server.run(name, "oracle")))
    running.start()
    end = time.monotonic() + 60
    while not asleep(seconds):
        assert time.monotonic() < end, "the trial did not begin"
        time.sleep(0.05)
    return running


def asleep(seconds: float) -> bool:
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if entry.read_bytes().rstrip(b"\0") == f"sleep\0{seconds}".encode():
                return True
    return False


def test_sandboxes_end_with_the_helper_that_made_them(own: Server) -> None:
    """The trial has no verdict, and says why; the next one has a new helper."""
    results: list[TrialResult] = []
    running = started(own, 30.25, results)
    first = forker(own, "fork_commands.py")
    assert first is not None
    os.kill(first, signal.SIGKILL)
    running.join(40)
    assert results[0].verdict.kind is VerdictKind.NO_VERDICT, results[0].verdict
    assert results[0].verdict.cause is Cause.SANDBOX_FAILED, results[0].verdict
    assert own.run("answer", "oracle").reward == 1.0
    assert forker(own, "fork_commands.py") not in (None, first)


def test_commands_go_on_when_what_starts_them_was_ended(own: Server) -> None:
    """As the kernel ends it when the sandbox is out of memory; the command of then is over."""
    results: list[TrialResult] = []
    running = started(own, 5.25, results)
    (spawner,) = spawners(own)
    os.kill(spawner, signal.SIGKILL)
    running.join(40)
    assert results[0].reward == 0.0, results[0].verdict
    assert not asleep(5.25)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_stays_when_the_server_ends(own: Server, number: int) -> None:
    loaded = forker(own)
    assert loaded is not None
    own.stop(number)
    end = time.monotonic() + 20
    while Path(f"/proc/{loaded}").exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert not Path(f"/proc/{loaded}").exists()


def test_a_trial_that_is_ended_leaves_the_host_no_zombie(own: Server) -> None:
    """Where the first process of a container waits for nobody, they would fill it up."""
    libc = ctypes.CDLL(None)
    assert libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0  # orphans come to this process
    make_task(own.tasks, "hasty", agent_s=1.5)
    model = ScriptedModel([bash("sleep 60 & sleep 50 & sleep 40"), bash(DONE)])
    try:
        result = own.run("hasty", MINI, base_url=model.url)
    finally:
        model.close()
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    assert result.verdict.cause is Cause.AGENT_TIMEOUT, result.verdict
    orphans = []
    for pid in processes.descendants(os.getpid()):
        _, _, rest = Path(f"/proc/{pid}/stat").read_text().partition("(")
        name, _, fields = rest.rpartition(")")
        state, parent, *_ = fields.split()
        if state == "Z" and int(parent) == os.getpid():
            orphans.append(name)
    assert not orphans
