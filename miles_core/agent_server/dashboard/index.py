"""The trials that have ended, in memory: a bounded index that never reads a directory twice.

It is filled once from the trials directory, in a thread, and then appended to as trials end.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from miles_core.agent_server.protocol import TrialResult, valid_id

MOST_TRIALS = 50_000
"""Trials that are kept, the newest; about 25 MB."""

MINUTES = 60
"""Minutes of the recent past that are counted one by one."""


@dataclass(frozen=True, slots=True)
class EndedTrial:
    """One line of the list. Times are seconds since 1970; what is not known is None."""

    trial_id: str
    task: str | None
    agent: str | None
    kind: str
    cause: str | None
    reward: float | None
    turns: int | None
    seconds: float | None
    created_at: float | None
    ended_at: float


@dataclass
class Counts:
    """How some trials ended; `scored` are those that have a reward."""

    ended: int = 0
    scored: int = 0
    reward_sum: float = 0.0
    no_verdict: int = 0

    def count(self, trial: EndedTrial, n: int) -> None:
        """Add a trial (`n` is 1) or take one away (-1)."""
        self.ended += n
        if trial.kind == "no_verdict":
            self.no_verdict += n
        else:
            self.scored += n
            self.reward_sum += n * (trial.reward or 0.0)


@dataclass
class TaskCounts(Counts):
    """How the trials of one task ended."""

    last_ended_at: float = 0.0


class TrialIndex:
    """Ended trials by id, oldest first, with counts of them."""

    def __init__(self, trials_dir: Path, most: int = MOST_TRIALS) -> None:
        self._dir = trials_dir
        self._most = most
        self._trials: dict[str, EndedTrial] = {}
        self._loading: asyncio.Task[None] | None = None
        self.loaded = False
        self.left_out = 0
        """Directories of older trials that are not in the index."""
        self.verdicts: Counter[tuple[str, str | None]] = Counter()
        self.tasks: dict[str, TaskCounts] = {}
        self.minutes: dict[int, Counts] = {}
        """What ended in each minute of the last hour, also what is not listed any more."""
        self._gone: set[str] = set()

    def load(self) -> None:
        """Begin to read the trials directory, unless that was begun; needs a running loop."""
        if self._loading is None:
            self._loading = asyncio.create_task(self._load(), name="trial-index")

    async def _load(self) -> None:
        made = await asyncio.to_thread(read_all, self._dir, self._most)
        for trial in self._trials.values():  # those that ended in the meantime
            made.add(trial)
        for trial_id in self._gone:
            made._drop(trial_id)
        self._gone.clear()
        self._trials, self.left_out = made._trials, made.left_out
        self.verdicts, self.tasks, self.minutes = made.verdicts, made.tasks, made.minutes
        self.loaded = True

    def add(self, trial: EndedTrial) -> None:
        """Put a trial at the new end; the oldest goes when there are too many."""
        known = self._drop(trial.trial_id)
        if known is not None:
            self._count_minute(known, -1)
        self._trials[trial.trial_id] = trial
        self._count(trial, 1)
        self._count_minute(trial, 1)
        if len(self._trials) > self._most:
            self._drop(next(iter(self._trials)))
            self.left_out += 1

    def remove(self, trial_id: str) -> None:
        """Take out a trial whose files were removed."""
        if self._drop(trial_id) is None and self.left_out:
            self.left_out -= 1
        if self._loading is not None and not self.loaded:
            self._gone.add(trial_id)  # it may be on its way from the disk

    def _drop(self, trial_id: str) -> EndedTrial | None:
        known = self._trials.pop(trial_id, None)
        if known is not None:
            self._count(known, -1)
        return known

    def get(self, trial_id: str) -> EndedTrial | None:
        return self._trials.get(trial_id)

    def newest_first(self) -> Iterator[EndedTrial]:
        return reversed(self._trials.values())

    def __len__(self) -> int:
        return len(self._trials)

    def _count(self, trial: EndedTrial, n: int) -> None:
        self.verdicts[(trial.kind, trial.cause)] += n
        task = self.tasks.setdefault(trial.task or "", TaskCounts())
        task.count(trial, n)
        task.last_ended_at = max(task.last_ended_at, trial.ended_at)
        if task.ended == 0:
            del self.tasks[trial.task or ""]

    def _count_minute(self, trial: EndedTrial, n: int) -> None:
        number, now = int(trial.ended_at // 60), int(time.time() // 60)
        if number in self.minutes or (n > 0 and now - MINUTES < number <= now + 1):
            self.minutes.setdefault(number, Counts()).count(trial, n)
        for old in [key for key in self.minutes if key <= now - MINUTES]:
            del self.minutes[old]


def read_all(trials_dir: Path, most: int) -> TrialIndex:
    """An index of the newest `most` ended trials of a directory."""
    places: list[tuple[float, Path]] = []
    for entry in trials_dir.iterdir():
        if not valid_id(entry.name):
            continue
        try:
            places.append(((entry / "result.json").stat().st_mtime, entry))
        except OSError:  # it is running, or it is no trial
            continue
    places.sort(key=lambda place: (place[0], place[1].name))
    index = TrialIndex(trials_dir, most)
    index.left_out = max(0, len(places) - most)
    for ended_at, entry in places[index.left_out :]:
        trial = read_one(entry, ended_at)
        if trial is not None:
            index.add(trial)
    return index


def read_one(directory: Path, ended_at: float) -> EndedTrial | None:
    """The line of one trial's directory; None when its result is none of ours."""
    result = _object(directory / "result.json")
    verdict = result.get("verdict")
    if not isinstance(verdict, dict) or not isinstance(verdict.get("kind"), str):
        return None
    started = _object(directory / "started.json")
    metrics = result.get("agent_metrics")
    metrics = metrics if isinstance(metrics, dict) else {}
    return EndedTrial(
        trial_id=directory.name,
        task=started.get("instance_id"),
        agent=started.get("agent_name"),
        kind=verdict["kind"],
        cause=verdict.get("cause"),
        reward=verdict.get("reward"),
        turns=metrics.get("turns"),
        seconds=metrics.get("total_time"),
        created_at=started.get("created_at"),
        ended_at=ended_at,
    )


def of_result(
    result: TrialResult, task: str, agent: str, created_at: float, ended_at: float
) -> EndedTrial:
    """The line of a trial that ended in this process."""
    verdict = result.verdict
    return EndedTrial(
        trial_id=result.trial_id,
        task=task,
        agent=agent,
        kind=verdict.kind.value,
        cause=verdict.cause.value if verdict.cause else None,
        reward=verdict.reward,
        turns=result.agent_metrics.turns,
        seconds=result.agent_metrics.total_time,
        created_at=created_at,
        ended_at=ended_at,
    )


def _object(path: Path) -> dict[str, Any]:
    try:
        found = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return {}
    return found if isinstance(found, dict) else {}
