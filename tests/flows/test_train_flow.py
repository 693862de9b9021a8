"""`miles train` as a person uses it: real Prefect, Ray and agent server; the driver stands in."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from miles_core.cluster import local_client
from miles_core.cluster import local_process as procs
from miles_core.cluster.stop import stop_run
from miles_core.cluster.supervise import stop_file
from miles_core.runs.directory import RunDir
from miles_core.runs.fold import fold
from miles_core.runs.journal import read
from miles_core.runs.lock import holder

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


class Person:
    """Types the same command again and again; every process it starts carries a mark."""

    def __init__(self, runs: Path) -> None:
        self.runs = runs
        self.mark = runs.name + str(time.time())
        self.children: list[subprocess.Popen[str]] = []

    def types(self, *words: str) -> "subprocess.Popen[str]":
        command = [sys.executable, str(ROOT / "tests/flows/standin_cli.py"), *words]
        env = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
        child = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**env, "TEST_MARK_OF_MILES": self.mark, "HOME": str(self.runs)},
            cwd=ROOT,
        )
        self.children.append(child)
        return child

    def trains(self, *more: str) -> "subprocess.Popen[str]":
        return self.types(
            *("train", "--preset", "quickstart", "--runs-dir", str(self.runs)),
            *("--agent-config", "none", "--task-check", "off", *more),
        )

    def left(self) -> list[procs.Process]:
        return procs.marked("TEST_MARK_OF_MILES", self.mark)


@pytest.fixture
def person(tmp_path: Path) -> Iterator[Person]:
    someone = Person(tmp_path / "runs")
    someone.runs.mkdir()
    yield someone
    for child in someone.children:
        child.kill()
        child.communicate()
    for record in someone.runs.glob("*/run.json"):
        if not record.parent.is_symlink():
            local_client.stop(RunDir(record.parent))
    procs.end(someone.left(), grace_s=5.0)


def plan(person: Person, **what: object) -> None:
    (person.runs / "plan.json").write_text(json.dumps(what))


def wait_for(condition: Callable[[], bool], timeout_s: float = 180.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.2)


def steps(person: Person) -> list[int]:
    events = read(person.runs / "latest" / "journal.jsonl")
    return [e["step"] for e in events if e["event"] == "step_trained"]


def test_the_same_command_after_a_kill_goes_on_with_the_run(person: Person) -> None:
    plan(person, steps=25, seconds=1.0)
    first = person.trains()
    wait_for(lambda: len(steps(person)) >= 2)
    first.kill()
    first.wait()
    second = person.trains()
    output, _ = second.communicate(timeout=300)
    assert second.returncode == 0, output
    assert "going on with the unfinished run" in output
    assert steps(person) == list(range(25))
    (run,) = [p.parent for p in person.runs.glob("*/run.json") if not p.parent.is_symlink()]
    assert output.splitlines()[-1] == str(run)
    assert RunDir(run).last_attempt() == 1  # attached to the job that went on
    wait_for(lambda: not person.left(), 30)
    assert not (run / "STOP").exists()


def test_a_run_that_was_completed_without_its_flow_leaves_nothing_to_the_next_command(
    person: Person,
) -> None:
    plan(person, steps=3, seconds=1.0)
    first = person.trains("--run-name", "alone")
    wait_for(lambda: len(steps(person)) >= 1)
    first.kill()
    first.wait()
    wait_for(lambda: len(steps(person)) == 3)
    second = person.trains("--run-name", "alone")
    output, _ = second.communicate(timeout=300)
    assert second.returncode == 0 and steps(person) == [0, 1, 2], output
    assert not person.left()


def test_a_crashed_job_is_tried_again_by_the_flow(person: Person) -> None:
    plan(person, steps=3, seconds=0.2, crash_at={"1": 1})
    child = person.trains()
    output, _ = child.communicate(timeout=300)
    assert child.returncode == 0, output
    assert steps(person) == [0, 1, 2]
    wait_for(lambda: not person.left(), 30)


def test_a_completed_run_goes_on_when_more_steps_are_asked_for(person: Person) -> None:
    plan(person, steps=3, seconds=0.1)
    first = person.trains()
    output, _ = first.communicate(timeout=300)
    assert first.returncode == 0 and steps(person) == [0, 1, 2], output
    name = (person.runs / "latest").resolve().name
    plan(person, steps=5, seconds=0.1)
    more = person.trains("--run-name", name, "--num-rollout", "5")
    output, _ = more.communicate(timeout=300)
    assert more.returncode == 0 and steps(person) == [0, 1, 2, 3, 4], output
    again = person.trains("--run-name", name, "--num-rollout", "5")
    output, _ = again.communicate(timeout=300)
    assert again.returncode == 0 and "is complete" in output and len(steps(person)) == 5
    wait_for(lambda: not person.left(), 30)


def test_of_two_that_start_one_run_one_says_who_drives_it(person: Person) -> None:
    plan(person, steps=25, seconds=1.0)
    both = [person.trains("--run-name", "same") for _ in range(2)]
    wait_for(lambda: any(child.poll() is not None for child in both))
    loser = next(child for child in both if child.poll() is not None)
    winner = next(child for child in both if child is not loser)
    output, _ = loser.communicate(timeout=60)
    assert loser.returncode == 2 and "is driven by" in output, output
    assert winner.poll() is None
    winner.send_signal(signal.SIGTERM)
    winner.communicate(timeout=120)
    wait_for(lambda: not person.left(), 30)


def test_a_signal_to_the_one_that_does_not_drive_a_run_leaves_the_other_alone(
    person: Person,
) -> None:
    plan(person, steps=25, seconds=1.0)
    both = [person.trains("--run-name", "same") for _ in range(2)]
    wait_for(lambda: holder(person.runs / "same") is not None)
    driver = holder(person.runs / "same")
    assert driver is not None
    winner = next(child for child in both if child.pid == driver.pid)
    loser = next(child for child in both if child is not winner)
    loser.send_signal(signal.SIGINT)
    output, _ = loser.communicate(timeout=60)
    assert loser.returncode == 2 and "is driven by" in output, output
    wait_for(lambda: len(steps(person)) >= 2)
    assert winner.poll() is None and not stop_file(RunDir(person.runs / "same")).exists()
    winner.send_signal(signal.SIGTERM)
    winner.communicate(timeout=120)
    wait_for(lambda: not person.left(), 30)


@pytest.mark.parametrize(("how", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("miles stop", 1)])
def test_a_cancel_ends_everything(person: Person, how: str, code: int) -> None:
    plan(person, steps=300, seconds=1.0)
    child = person.trains()
    wait_for(lambda: len(steps(person)) >= 1)
    run = RunDir((person.runs / "latest").resolve())
    if how == "miles stop":
        assert stop_run(run, "miles stop")
    else:
        child.send_signal(signal.Signals[how])
    output, _ = child.communicate(timeout=120)
    assert child.returncode == code and "miles resume" in output, output
    state = fold(read(run.journal))
    assert (state.state, state.detail) == ("cancelled", how)
    wait_for(lambda: not person.left(), 30)
