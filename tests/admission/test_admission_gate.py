"""Training asks for admission: what is checked, what is refused, and what a person can do."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from admission_helpers import make_task

from miles_core.admission.check import Progress
from miles_core.admission.gate import Gate, Mode, TasksRefused
from miles_core.admission.report import State
from miles_core.agent_server.client import AgentServerClient
from miles_core.cluster import local_process as procs
from miles_core.cluster.own_agent import OwnAgentServer
from miles_core.cluster.task_gate import admit_tasks
from miles_core.config.schema import MilesConfig
from miles_core.errors import UserError
from miles_core.runs.directory import RunDir
from miles_core.runs.journal import read

MILES = Path(sys.executable).with_name("miles")
ROOT = Path(__file__).parents[2]
WRONG = "#!/bin/bash\necho wrong > /app/answer.txt\n"


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("gate-tasks")
    make_task(root, "good")
    make_task(root, "other", solve="#!/bin/bash\nset -e\necho forty-two > /app/answer.txt\n")
    make_task(root, "wrong", solve=WRONG)
    make_task(root, "no-solution", solve=None)
    return root


@pytest.fixture(scope="module")
def server(tasks: Path) -> Iterator[tuple[str, str]]:
    with OwnAgentServer(tasks, max_concurrent=2).serve() as known:
        yield known


def ask(gate: Gate, server: tuple[str, str]) -> list[Progress]:
    seen: list[Progress] = []

    async def main() -> None:
        async with AgentServerClient(*server) as client:
            await gate.check(client, seen.append)

    asyncio.run(main())
    return seen


def make_gate(tasks: Path, cache: Path, mode: Mode, *names: str) -> Gate:
    return Gate(tasks, set(names), cache, "bubblewrap", mode)


def test_unknown_tasks_are_checked_once(
    tasks: Path, server: tuple[str, str], tmp_path: Path
) -> None:
    first = ask(make_gate(tasks, tmp_path, "run", "good", "other"), server)
    assert (first[-1].done, first[-1].cached, first[-1].states[State.ADMITTED]) == (2, 0, 2)
    again = ask(make_gate(tasks, tmp_path, "run", "good", "other"), server)
    assert (again[-1].done, again[-1].cached) == (2, 2)
    ask(make_gate(tasks, tmp_path, "require", "good", "other"), ("http://127.0.0.1:1", "none"))


def test_a_task_that_fails_stops_the_run(
    tasks: Path, server: tuple[str, str], tmp_path: Path
) -> None:
    gate = make_gate(tasks, tmp_path, "run", "good", "wrong")
    gate.check_cache()  # nothing is known yet
    with pytest.raises(TasksRefused) as refused:
        ask(gate, server)
    text = str(refused.value)
    assert "1 of the run's 2 tasks" in text
    assert "wrong: failed: the solution gets 0, not 1" in text
    assert "--task-check off" in text
    with pytest.raises(TasksRefused):
        gate.check_cache()
    ask(make_gate(tasks, tmp_path, "off", "good", "wrong"), server)


def test_without_a_solution_a_task_is_let_through_with_a_warning_unless_proof_is_required(
    tasks: Path, server: tuple[str, str], tmp_path: Path
) -> None:
    gate = make_gate(tasks, tmp_path, "run", "no-solution")
    ask(gate, server)
    assert gate.unproven == ["no-solution"]
    with pytest.raises(TasksRefused, match="unproven"):
        make_gate(tasks, tmp_path, "require", "no-solution").check_cache()


def test_tasks_that_cannot_be_read_here_are_checked_every_time(
    server: tuple[str, str], tmp_path: Path
) -> None:
    gate = make_gate(tmp_path / "elsewhere", tmp_path, "run", "no-solution")
    for _ in range(2):
        assert ask(gate, server)[-1].cached == 0
    assert gate.unproven == ["no-solution"]
    with pytest.raises(TasksRefused, match="set --tasks-dir to the folder"):
        make_gate(tmp_path / "elsewhere", tmp_path, "require", "good").check_cache()


def test_a_server_that_does_not_answer_is_held_against_no_task(tasks: Path, tmp_path: Path) -> None:
    gate = make_gate(tasks, tmp_path, "run", "good")
    with pytest.raises(ConnectionError):
        ask(gate, ("http://127.0.0.1:1", "none"))
    assert not list(tmp_path.iterdir())


def config_of(tasks: Path, small: MilesConfig, tmp_path: Path) -> MilesConfig:
    server = small.agent_server.model_copy(update={"tasks_dir": tasks})
    run = small.run.model_copy(update={"runs_dir": tmp_path / "runs"})
    return small.model_copy(update={"agent_server": server, "run": run})


def test_a_run_journals_the_progress_and_ends_when_it_is_cancelled(
    tasks: Path, server: tuple[str, str], tmp_path: Path, small_config: MilesConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("miles_core.cluster.task_gate._EVERY_S", 0.0)
    config = config_of(tasks, small_config, tmp_path)
    run = RunDir.create(tmp_path / "runs" / "one", config, {})
    known = (*server, "bubblewrap")
    names = {"good", "no-solution"}
    assert admit_tasks(run, config, names, known, lambda: None) == ["no-solution"]
    events = [e for e in read(run.journal) if e["event"] == "tasks_checked"]
    assert [e["done"] for e in events] == [0, 1, 2]
    (alarm,) = [e for e in read(run.journal) if e["event"] == "alarm"]
    assert alarm["kind"] == "tasks_unproven"
    assert alarm["detail"].endswith("no solution in no-solution")
    assert events[-1]["refused"] == 1

    def cancel() -> None:
        raise UserError("cancelled")

    with pytest.raises(UserError, match="cancelled"):
        admit_tasks(run, config, {"good", "wrong"}, known, cancel)
    # Had the trials not been ended with it, the server would still run one.
    health = asyncio.run(_health(server))
    assert (health.running, health.queued) == (0, 0)


async def _health(server: tuple[str, str]):
    async with AgentServerClient(*server) as client:
        return await client.health()


def train(tasks: Path, runs: Path, names: list[str], *flags: str):
    rows = runs / "rows.jsonl"
    lines = [{"prompt": "do it", "metadata": {"instance_id": name}} for name in names]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [str(MILES), "train", "--preset", "quickstart", "--runs-dir", str(runs)]
    command += ["--run-name", "r", "--prompt-data", str(rows), "--tasks-dir", str(tasks), *flags]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)


def test_miles_train_refuses_before_a_run_is_made(
    tasks: Path, server: tuple[str, str], tmp_path: Path
) -> None:
    cache = tmp_path / ".cache" / "task_checks.json"
    command = [str(MILES), "tasks", "check", str(tasks), "good", "wrong", "--cache", str(cache)]
    command += ["--agent-server-url", server[0]]
    env = {**os.environ, "HARBOR_ADMIN_SECRET": server[1]}
    assert subprocess.run(command, capture_output=True, timeout=120, env=env).returncode == 1
    done = train(tasks, tmp_path, ["good", "wrong"])
    assert done.returncode == 2, done.stderr
    assert "1 of the run's 2 tasks are not admitted" in done.stderr
    assert "wrong: failed: the solution gets 0, not 1" in done.stderr
    done = train(tasks, tmp_path, ["good", "other"], "--task-check", "require")
    assert done.returncode == 2, done.stderr
    assert "other: undecided: it was not checked as it is now" in done.stderr
    assert not (tmp_path / "r").exists()


def test_ctrl_c_keeps_what_was_found_and_leaves_nothing_running(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks"
    make_task(tasks, "a-good")
    make_task(tasks, "hangs", solve="#!/bin/bash\nsleep 1000\n", agent_s=600.0)
    cache = tmp_path / "checks.json"
    command = [str(MILES), "tasks", "check", str(tasks), "--cache", str(cache)]
    mark = f"{tmp_path.name}-{os.getpid()}"
    env = {**os.environ, "TEST_MARK_OF_TASKS": mark}
    child = subprocess.Popen(
        command,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A job in the background of a script is started with the signal ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 90
    while not cache.exists():
        assert child.poll() is None
        assert time.monotonic() < deadline, "the good task was not saved"
        time.sleep(0.1)
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=90)
    assert child.returncode == 130, errors
    assert b"Traceback" not in errors
    (report,) = json.loads(cache.read_text())["reports"].values()
    assert (report["task"], report["state"]) == ("a-good", "admitted")
    assert procs.wait_gone(procs.marked("TEST_MARK_OF_TASKS", mark), 20.0)


@pytest.mark.slow
def test_a_limit_of_the_server_is_not_held_against_a_task_for_good(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks"
    make_task(tasks, "long", solve="#!/bin/bash\nsleep 1000\n", agent_s=600.0)
    make_task(tasks, "hangs", solve="#!/bin/bash\nsleep 999\n", agent_s=1.0)
    cache = tmp_path / "checks.json"
    command = [str(MILES), "tasks", "check", str(tasks), "--cache", str(cache)]
    done = subprocess.run(
        [*command, "--agent-timeout", "2"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1, done.stderr
    assert "note: the agent server's own limit of 2 s ended the solution" in done.stdout
    (kept,) = json.loads(cache.read_text())["reports"].values()
    assert kept["task"] == "hangs"


def test_a_server_that_cannot_start_says_why(tasks: Path) -> None:
    server = OwnAgentServer(tasks, max_concurrent=1, sandbox="bubblewarp")
    with pytest.raises(UserError) as told, server.serve():
        raise AssertionError("it started")
    assert "did you mean bubblewrap?" in told.value.fix
