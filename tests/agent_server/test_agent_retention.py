"""What is kept of ended trials."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from miles_core.agent_server.retention import GIVEN_S, REMOVED, UNGIVEN_S, Retention

pytestmark = pytest.mark.asyncio


def make(root: Path, name: str, age: int, ended: bool = True) -> None:
    (root / name / "harbor").mkdir(parents=True)
    (root / name / "harbor" / "trial.log").write_text("log")
    (root / name / "started.json").write_text("{}")
    if ended:
        result = root / name / "result.json"
        result.write_text("{}")
        os.utime(result, (1000 - age, 1000 - age))


async def test_the_newest_are_kept_and_running_ones_are_not_touched(tmp_path: Path) -> None:
    for number in range(5):
        make(tmp_path, f"t{number}", age=number)
    make(tmp_path, "running", age=0, ended=False)
    (tmp_path / ".base").mkdir()
    (tmp_path / f"{REMOVED}x").mkdir()
    kept = Retention(tmp_path, 3)
    removed: list[str] = []
    kept.watchers.append(removed.append)
    kept.open()
    await kept.close()
    assert sorted(os.listdir(tmp_path)) == [".base", "running", "t0", "t1", "t2"]
    make(tmp_path, "new", age=0)
    kept.ended("new")
    await kept.close()
    assert sorted(os.listdir(tmp_path)) == [".base", "new", "running", "t0", "t1"]
    assert removed == ["t4", "t3", "t2"]


async def test_a_directory_that_someone_removed_is_no_error(tmp_path: Path) -> None:
    now = 5000.0
    kept = Retention(tmp_path, 1, lambda: now)
    kept.open()
    make(tmp_path, "b", age=0)
    for name in "abc":
        kept.ended(name)
    now += UNGIVEN_S
    kept.shrink()
    await kept.close()
    assert os.listdir(tmp_path) == []


class Clocked:
    """Retention of two trials with a clock that the test moves."""

    def __init__(self, root: Path, *unwritten: str) -> None:
        self.root, self.now = root, 1000.0
        self.kept = Retention(root, 2, lambda: self.now)
        self.kept.open(unwritten)

    def end(self, *names: str) -> None:
        for name in names:
            make(self.root, name, age=0)
            self.kept.ended(name)

    def at(self, seconds: float) -> list[str]:
        """What is kept so many seconds after the start."""
        self.now = 1000.0 + seconds
        self.kept.shrink()
        return sorted(name for name in os.listdir(self.root) if not name.startswith("."))


async def test_what_no_client_was_given_is_kept_for_an_hour(tmp_path: Path) -> None:
    clocked = Clocked(tmp_path)
    clocked.end(*"abcd")
    assert clocked.at(UNGIVEN_S - 1) == ["a", "b", "c", "d"]
    clocked.end("e")
    assert clocked.at(UNGIVEN_S) == ["d", "e"]  # those that are still the newest two
    await clocked.kept.close()


async def test_what_was_given_is_removed_first_and_not_at_once(tmp_path: Path) -> None:
    clocked = Clocked(tmp_path)
    clocked.end(*"abcd")
    clocked.kept.given("b")
    clocked.kept.given("d")
    clocked.kept.given("unknown")
    assert clocked.at(GIVEN_S - 1) == ["a", "b", "c", "d"]
    assert clocked.at(GIVEN_S) == ["a", "c"]
    clocked.kept.given("a")  # there are no more than two
    assert clocked.at(10 * UNGIVEN_S) == ["a", "c"]
    await clocked.kept.close()


async def test_a_new_server_knows_of_no_client(tmp_path: Path) -> None:
    for number, name in enumerate("abcd"):
        make(tmp_path, name, age=4 - number)  # ended just before 1000
    clocked = Clocked(tmp_path, "d", "unwritten")
    assert clocked.at(0) == ["a", "b", "c", "d"]
    assert clocked.at(UNGIVEN_S - 1) == ["d"]  # and `unwritten`, which has no result here
    await clocked.kept.close()
