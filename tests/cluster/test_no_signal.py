"""Rewards without any spread raise an alarm: within groups, or over the step."""

from pathlib import Path

import pytest

from miles_core.cluster.no_signal import NoSignal
from miles_core.runs import journal

GROUPS_ALIKE = [[1.0, 1.0], [0.0, 0.0]]


@pytest.mark.parametrize(
    ("whole_step", "rewards", "what"),
    [
        (False, GROUPS_ALIKE, "no group has shown a spread"),
        (False, [[1.0, 0.0], [0.0, 0.0]], None),
        (True, [[1.0], [1.0]], "no step has shown a spread"),
        (True, GROUPS_ALIKE, None),
    ],
)
def test_what_counts_as_a_signal(
    tmp_path: Path, whole_step: bool, rewards: list[list[float]], what: str | None
) -> None:
    path = tmp_path / "journal.jsonl"
    with journal.Journal(path) as events:
        watcher = NoSignal(2, events, whole_step)
        for step in range(3):
            watcher.record(step, rewards)
    alarms = [e["detail"] for e in journal.read(path)] if path.exists() else []
    assert [what in alarm for alarm in alarms] == ([True] if what else [])
