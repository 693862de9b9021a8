"""What a verifier tells beside its reward: each named reward, the tests that it ran, the steps.

Everything here was written in a sandbox. It is bounded and checked, and whatever is wrong with it
has no bearing on the verdict.
"""

from __future__ import annotations

import json
import stat
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harbor.models.trial.result import TrialResult as HarborResult

CTRF = "ctrf.json"
CTRF_LIMIT = 8 << 20
"""Bytes of a test report that is read."""
STATUSES = ("passed", "failed", "skipped", "pending", "other")
"""What a test can have ended in (Common Test Report Format, `results.tests[].status`)."""
REWARDS_KEPT = 50
NAMES_KEPT = 20
NAME_LENGTH = 200


def report_of(
    rewards: Mapping[str, float], harbor: HarborResult, trial_dir: Path
) -> dict[str, Any]:
    """The `eval_report` of a graded trial.

    The named rewards; `ctrf`, when the verifier left a test report; and for a task of several
    steps `steps`, with the name, the rewards and the test report of each step that was graded. A
    reward that is itself named `ctrf` or `steps` is kept, and the report of that name is not.
    """
    report: dict[str, Any] = _named(rewards)
    extra: dict[str, Any] = {"ctrf": read_ctrf(trial_dir / "verifier")}
    steps = [step for step in harbor.step_results or [] if step.verifier_result is not None]
    extra["steps"] = [
        {"name": name_of(step.step_name), "rewards": _named(step.verifier_result.rewards or {})}
        | _with_ctrf(read_ctrf(trial_dir / "steps" / step.step_name / "verifier"))
        for step in steps[:NAMES_KEPT]
        if step.verifier_result is not None
    ]
    return report | {key: value for key, value in extra.items() if value and key not in report}


def _with_ctrf(report: dict[str, Any] | None) -> dict[str, Any]:
    return {} if report is None else {"ctrf": report}


def _named(rewards: Mapping[str, float]) -> dict[str, float]:
    """At most `REWARDS_KEPT` rewards, `reward` among them; numbers beyond a float are left out."""
    first = sorted(rewards, key=lambda key: key != "reward")[:REWARDS_KEPT]
    return {name_of(key): rewards[key] for key in first if abs(rewards[key]) <= 1e300}


def read_ctrf(directory: Path) -> dict[str, Any] | None:
    """The test report in a verifier's folder, in short, or None when there is none.

    `tests` is how many there are, then there is the number of each status that occurs, `tool` and
    `failed_tests` (names, at most 20). A report that cannot be read gives `{"problem": text}`.
    """
    path = directory / CTRF
    try:
        status = path.lstat()
    except OSError:
        return None
    if not stat.S_ISREG(status.st_mode) or status.st_size > CTRF_LIMIT:
        return {"problem": f"{CTRF} is no file of at most {CTRF_LIMIT >> 20} MiB"}
    try:
        return _summary(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        return {"problem": f"{CTRF}: {type(error).__name__}"}


def _summary(content: Any) -> dict[str, Any]:
    """Counts and names; raises TypeError or KeyError for what is no test report."""
    results = content["results"]
    if not isinstance(results, dict):
        raise TypeError("results")
    tests = results.get("tests") or []
    if not isinstance(tests, list):
        raise TypeError("tests")
    tests = [test for test in tests if isinstance(test, dict)]
    counts = Counter(_status(test) for test in tests) or _counts(results.get("summary"))
    tool = results.get("tool")
    failed = [name_of(test.get("name")) for test in tests if _status(test) == "failed"]
    return {
        **({"tool": name_of(tool.get("name"))} if isinstance(tool, dict) else {}),
        "tests": sum(counts.values()),
        **{status: counts[status] for status in STATUSES if counts[status]},
        **({"failed_tests": failed[:NAMES_KEPT]} if failed else {}),
    }


def _status(test: dict[str, Any]) -> str:
    status = test.get("status")
    return status if status in STATUSES else "other"


def _counts(summary: Any) -> Counter[str]:
    """The numbers of a report that lists no test."""
    if not isinstance(summary, dict):
        raise TypeError("summary")
    numbers = {status: summary.get(status) or 0 for status in STATUSES}
    if not all(type(number) is int and 0 <= number < 10**9 for number in numbers.values()):
        raise TypeError("summary")
    return Counter(numbers)


def name_of(value: Any) -> str:
    """A name from a sandbox as one line that can be written anywhere."""
    text = " ".join(str(value).split())[:NAME_LENGTH]
    return text.encode("utf-8", "replace").decode()
