"""What is kept of ended trials."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from miles_core.agent_server.retention import REMOVED, Retention

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
    kept = Retention(tmp_path, 1)
    kept.open()
    make(tmp_path, "b", age=0)
    kept.ended("a")
    kept.ended("b")
    kept.ended("c")
    await kept.close()
    assert os.listdir(tmp_path) == []
