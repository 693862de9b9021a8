"""Each way in which a task can be unfit gets its state, with a reason, on a real agent server."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from admission_helpers import make_all

MILES = Path(sys.executable).with_name("miles")
WORDS = {
    "oracle-fails": "the solution gets 0, not 1",
    "silent-need": "the solution gets 0, not 1",
    "nop-passes": "reward 1 for doing nothing",
    "reads-a-file": "a reward that the agent wrote is taken",
    "keeps-a-reward": "a reward that the agent wrote is taken",
    "writes-nothing": "reward_missing",
    "copied": "solution/solve.sh is in /srv/deep/notes",
    "tests-baked": "the agent can read /tests",
    "in-git": "solution/solve.sh is in a git commit",
    "no-solution": "no solution",
    "broken-toml": "broken-toml/task.toml: no TOML",
    "unsupported": "nvidia/cuda",
    "hangs": "the solution gets 0, not 1 after its time was up",
    "verifier-hangs": "verifier_timeout",
    "odd name": "no task id: it has ' '",
    "no-tests": "it has no tests/test.sh",
    "no-instruction": "it has no instruction.md",
    "no-toml": "it has no task.toml",
    "a-step-without-tests": "it has no steps/one/instruction.md",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("admission")


REST = {"oracle-fails", "nop-passes", "reads-a-file", "tests-baked", "hangs", "unsupported"}
"""Tasks that are left to the slow tests; what is made of their trials has tests of its own."""


def make_some(root: Path, rest: bool) -> dict[str, str]:
    """The tasks of the default tests, or the rest of them, and their states."""
    root.mkdir()
    states = make_all(root)
    for name in [name for name in states if (name in REST) != rest]:
        shutil.rmtree(root / name)
        del states[name]
    return states


def check(place: Path) -> subprocess.CompletedProcess[str]:
    command = [str(MILES), "tasks", "check", str(place / "tasks"), "--json"]
    command += ["--cache", str(place / "cache.json"), "--max-concurrent", "4"]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


@pytest.fixture(scope="module")
def states(place: Path) -> dict[str, str]:
    return make_some(place / "tasks", rest=False)


@pytest.fixture(scope="module")
def checked(place: Path, states: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return check(place)


@pytest.fixture(scope="module")
def report(checked: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert checked.returncode == 1, checked.stderr
    return json.loads(checked.stdout)


@pytest.fixture(scope="module")
def tasks(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {task["task"]: task for task in report["tasks"]}


def test_each_task_has_its_state(
    states: dict[str, str], tasks: dict[str, dict[str, Any]], report: dict[str, Any]
) -> None:
    found = {name: task["state"] for name, task in tasks.items()}
    assert found == states
    assert report["admitted"] is False
    assert report["states"]["failed"] == list(states.values()).count("failed")


def test_a_good_task_was_looked_at_from_all_sides(tasks: dict[str, dict[str, Any]]) -> None:
    good = tasks["good"]
    assert (good["oracle"]["reward"], good["nop"]["reward"]) == (1.0, 0.0)
    assert (good["forged_reward_survives"], good["solution_hidden"]) == (False, True)
    assert {"environment", "agent", "verifier", "total"} <= good["oracle"]["seconds"].keys()
    assert good["seconds"] > 0
    assert good["disk_bytes"] is not None
    assert good["reasons"] == good["fixes"] == good["findings"] == []


def check_reasons(tasks: dict[str, dict[str, Any]]) -> None:
    told = WORDS.keys() & tasks.keys()
    assert tasks.keys() - told == {"good"} & tasks.keys()
    for name in told:
        task = tasks[name]
        assert WORDS[name] in "; ".join(task["reasons"]), task
        assert len(task["fixes"]) == len(task["reasons"])
        assert all(task["fixes"])


def test_the_reason_and_the_way_on_are_told(tasks: dict[str, dict[str, Any]]) -> None:
    check_reasons(tasks)


@pytest.mark.slow
def test_the_rest_of_the_tasks(tmp_path: Path) -> None:
    states = make_some(tmp_path / "tasks", rest=True)
    tasks = {task["task"]: task for task in json.loads(check(tmp_path).stdout)["tasks"]}
    assert {name: task["state"] for name, task in tasks.items()} == states
    check_reasons(tasks)
    assert "no network" not in tasks["oracle-fails"]["fixes"][0]
    assert [n for n, task in tasks.items() if task["forged_reward_survives"]] == ["reads-a-file"]
    assert [n for n, task in tasks.items() if task["solution_hidden"] is False] == ["tests-baked"]


def test_a_silent_need_of_the_network_is_hinted_at(tasks: dict[str, dict[str, Any]]) -> None:
    """Nothing of it is seen in a trial; a task that declares that it has none gets no hint."""
    assert (tasks["silent-need"]["oracle"]["cause"], tasks["silent-need"]["notes"]) == (None, [])
    assert "the sandbox has no network" in tasks["silent-need"]["fixes"][0]


def test_only_the_fault_of_a_task_is_held_against_it(tasks: dict[str, dict[str, Any]]) -> None:
    survivors = {name for name, task in tasks.items() if task["forged_reward_survives"]}
    assert survivors == {"keeps-a-reward"}
    seen = {name for name, task in tasks.items() if task["solution_hidden"] is False}
    assert seen == {"copied", "in-git"}


def test_a_verifier_without_a_word_gives_no_verdict(tasks: dict[str, dict[str, Any]]) -> None:
    silent = tasks["writes-nothing"]
    assert silent["nop"]["reward"] is None
    assert silent["forged_reward_survives"] is False


def test_no_process_is_left(place: Path, checked: subprocess.CompletedProcess[str]) -> None:
    mark = str(place / "tasks").encode()
    left = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "cmdline").read_bytes():
                left.append(folder.name)
        except OSError:
            continue
    assert left == []


def test_the_table_comes_from_the_cache(place: Path, tasks: dict[str, dict[str, Any]]) -> None:
    names = ["good", "copied", "no-solution"]
    command = [str(MILES), "tasks", "check", str(place / "tasks"), *names]
    # A Python that cannot serve shows that no server was started.
    command += ["--cache", str(place / "cache.json"), "--agent-python", "/bin/false"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stderr
    lines = {line.split()[0]: line for line in done.stdout.splitlines() if line.strip()}
    assert "admitted (cached)" in lines["good"]
    assert "failed (cached)" in lines["copied"]
    assert "is in /srv/deep/notes" in lines["copied"]
    assert "unproven (cached)" in lines["no-solution"]
    assert "3 from the cache" in done.stdout
