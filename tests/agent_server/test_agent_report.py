"""What a verifier leaves beside its reward is bounded and checked, and never breaks anything."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("harbor")
from miles_core.agent_server.report import CTRF_LIMIT, NAMES_KEPT, read_ctrf, report_of  # noqa: E402

pytestmark = pytest.mark.agent_env


def ctrf(folder: Path, content: Any) -> dict[str, Any] | None:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    (folder / "ctrf.json").write_bytes(text)
    return read_ctrf(folder)


def results(**fields: Any) -> dict[str, Any]:
    return {"results": fields}


def test_counts_and_names(tmp_path: Path) -> None:
    tests = [{"name": f"t{n}", "status": "failed"} for n in range(NAMES_KEPT + 5)]
    tests += [{"name": "ok", "status": "passed"}, {"status": "weird"}, "no test"]
    found = ctrf(tmp_path, results(tests=tests, summary={"tests": 1, "passed": 1}))
    assert found is not None
    assert (found["tests"], found["failed"], found["passed"]) == (NAMES_KEPT + 7, 25, 1)
    assert found["other"] == 1 and found["failed_tests"] == [f"t{n}" for n in range(NAMES_KEPT)]


def test_summary_counts_when_no_test_is_listed(tmp_path: Path) -> None:
    found = ctrf(tmp_path, results(summary={"tests": 9, "passed": 2, "failed": 1, "start": 5}))
    assert found == {"tests": 3, "passed": 2, "failed": 1}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        [],
        7,
        {},
        results(),
        {"results": []},
        results(tests={}, summary=None),
        results(tests=[], summary={"passed": -1}),
        results(tests=[], summary={"passed": 10**40}),
        results(tests=[], summary={"passed": True}),
        results(tests="abc"),
    ],
)
def test_broken_reports_are_a_problem_and_no_error(tmp_path: Path, content: Any) -> None:
    found = ctrf(tmp_path, content)
    assert found is not None and list(found) == ["problem"]


def test_names_can_be_written_anywhere(tmp_path: Path) -> None:
    name = "a\n\x00b" + "x" * 1000
    tests = b'{"results": {"tests": [{"status": "failed", "name": "\\ud800"}, '
    tests += json.dumps({"status": "failed", "name": name}).encode() + b"]}}"
    found = ctrf(tmp_path, tests)
    assert found is not None
    first, second = found["failed_tests"]
    assert first == "?" and "\n" not in second and len(second) <= 200
    json.dumps(found, ensure_ascii=False).encode()


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    assert read_ctrf(tmp_path) is None
    path = tmp_path / "ctrf.json"
    os.mkfifo(path)
    assert list(read_ctrf(tmp_path) or {}) == ["problem"]
    path.unlink()
    path.symlink_to("/etc/passwd")
    assert list(read_ctrf(tmp_path) or {}) == ["problem"]
    path.unlink()
    with path.open("wb") as file:
        file.truncate(CTRF_LIMIT + 1)
    assert list(read_ctrf(tmp_path) or {}) == ["problem"]


def test_rewards_are_bounded_and_keep_their_names(tmp_path: Path) -> None:
    rewards: dict[str, float] = {f"k{n:03}": n for n in range(200)}
    report = report_of({**rewards, "reward": 0.5}, SimpleNamespace(step_results=None), tmp_path)
    assert report["reward"] == 0.5 and len(report) == 50
    (tmp_path / "verifier").mkdir()
    ctrf(tmp_path / "verifier", results(summary={"passed": 1}))
    report = report_of({"reward": 1, "ctrf": 0.25}, SimpleNamespace(step_results=None), tmp_path)
    assert report == {"reward": 1, "ctrf": 0.25}
