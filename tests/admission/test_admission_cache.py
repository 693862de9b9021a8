"""What counts as the same task, and what is kept of a check."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
from admission_helpers import make_task

from miles_core.admission import cache as cache_module
from miles_core.admission import check
from miles_core.admission.cache import CheckCache
from miles_core.admission.check import cached_reports
from miles_core.admission.digest import (
    has_solution,
    is_task,
    needs_no_network,
    no_tasks,
    task_digest,
    task_names,
)
from miles_core.admission.report import State, TaskReport
from miles_core.errors import UserError


def report(name: str, digest: str, state: State = State.ADMITTED) -> TaskReport:
    return TaskReport(task=name, state=state, digest=digest)


def changed_content(task: Path) -> None:
    (task / "tests/test.sh").write_text("#!/bin/bash\nexit 0\n")


def changed_mode(task: Path) -> None:
    (task / "solution/solve.sh").chmod(0o700)


def changed_name(task: Path) -> None:
    (task / "instruction.md").rename(task / "instructions.md")


def new_empty_folder(task: Path) -> None:
    (task / "environment/data").mkdir()


def new_link(task: Path) -> None:
    (task / "environment/link").symlink_to("Dockerfile")


@pytest.mark.parametrize(
    "change", [changed_content, changed_mode, changed_name, new_empty_folder, new_link]
)
def test_every_change_of_a_task_changes_its_digest(tmp_path: Path, change) -> None:
    task = make_task(tmp_path, "one")
    before = task_digest(task)
    assert task_digest(make_task(tmp_path / "elsewhere", "two")) == before
    change(task)
    assert task_digest(task) != before


def test_a_link_counts_by_what_it_leads_to(tmp_path: Path) -> None:
    task = make_task(tmp_path, "one")
    (tmp_path / "outside").write_text("before")
    (task / "environment/link").symlink_to("../../outside")
    before = task_digest(task)
    (tmp_path / "outside").write_text("after")
    assert task_digest(task) != before


def test_what_has_no_end_is_not_read(tmp_path: Path) -> None:
    task = make_task(tmp_path, "one")
    found = {task_digest(task)}
    os.mkfifo(task / "environment/pipe")
    found.add(task_digest(task))
    for name, target in {"zero": "/dev/zero", "kmsg": "/proc/kmsg", "root": "/"}.items():
        (task / "environment" / name).symlink_to(target)
        found.add(task_digest(task))
    assert len(found) == 5
    for target in (None, "/dev/zero", "/proc/kmsg"):
        (task / "task.toml").unlink()
        os.mkfifo(task / "task.toml") if target is None else (task / "task.toml").symlink_to(target)
        assert task_digest(task) not in found and not needs_no_network(task)


def test_a_task_that_vanished_stops_no_check(tmp_path: Path, monkeypatch: Any) -> None:
    make_task(tmp_path, "one")
    cache = CheckCache(tmp_path / "cache.json", "bubblewrap")
    cache.put(report("one", task_digest(tmp_path / "one")))
    assert cached_reports(tmp_path, cache, ["one", "gone"]).keys() == {"one"}

    def gone(task: Path) -> str:
        raise FileNotFoundError(task)

    monkeypatch.setattr(check, "task_digest", gone)
    assert cached_reports(tmp_path, cache, ["one"]) == {}


def test_task_folders_are_told_from_others(tmp_path: Path) -> None:
    make_task(tmp_path, "one")
    (tmp_path / "notes").mkdir()
    (tmp_path / ".git").mkdir()
    make_task(tmp_path, "without-toml", solve=None)
    (tmp_path / "without-toml/task.toml").unlink()
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes" / "file").touch()
    (tmp_path / "rows.jsonl").touch()
    (tmp_path / "absent").symlink_to("nowhere")
    (tmp_path / "linked").symlink_to("rows.jsonl")
    assert task_names(tmp_path) == ["one", "without-toml"]
    assert no_tasks(tmp_path) == {
        "hidden": [".git"],
        "a link that leads nowhere": ["absent"],
        "an empty folder": ["empty"],
        "a file": ["linked", "rows.jsonl"],
        "a folder without task.toml": ["notes"],
    }
    assert is_task(tmp_path / "one")
    assert not is_task(tmp_path)
    assert [has_solution(tmp_path / n) for n in ("one", "without-toml")] == [True, False]


def test_a_report_is_found_by_content_and_sandbox(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "checks.json"
    cache = CheckCache(path, "bubblewrap")
    cache.put(report("one", "d1", State.FAILED))
    cache.save()
    found = CheckCache(path, "bubblewrap").get("renamed", "d1")
    assert found is not None
    assert (found.task, found.state, found.cached) == ("renamed", State.FAILED, True)
    assert found.checked_at is not None
    assert CheckCache(path, "bubblewrap").get("one", "d2") is None
    assert CheckCache(path, "docker").get("one", "d1") is None


def test_what_says_nothing_of_a_task_is_not_kept(tmp_path: Path) -> None:
    cache = CheckCache(tmp_path / "checks.json", "bubblewrap")
    cache.put(report("one", "d1", State.UNDECIDED))
    cache.save()
    assert not (tmp_path / "checks.json").exists()
    assert cache.get("one", "d1") is None


def test_another_version_of_the_checks_forgets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "checks.json"
    cache = CheckCache(path, "bubblewrap")
    cache.put(report("one", "d1"))
    cache.save()
    monkeypatch.setattr(cache_module, "CHECKS_VERSION", cache_module.CHECKS_VERSION + 1)
    assert CheckCache(path, "bubblewrap").get("one", "d1") is None


BROKEN = f'{{"checks_version": {cache_module.CHECKS_VERSION}, "reports": {{"a": 1}}}}'


@pytest.mark.parametrize("content", ["", "{}", "[1]", BROKEN])
def test_a_file_that_is_no_cache_is_told_and_kept(tmp_path: Path, content: str) -> None:
    path = tmp_path / "checks.json"
    path.write_text(content)
    with pytest.raises(UserError, match="does not hold results"):
        CheckCache(path, "bubblewrap")
    assert path.read_text() == content


def add(path: Path, number: int) -> None:
    cache = CheckCache(path, "bubblewrap")
    for k in range(10):
        cache.put(report(f"t{number}", f"d{number}-{k}"))
        cache.save()


def test_writers_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "checks.json"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=add, args=(path, number)) for number in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert [writer.exitcode for writer in writers] == [0] * 4
    assert len(json.loads(path.read_text())["reports"]) == 40
