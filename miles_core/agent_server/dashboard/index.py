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
class TaskCounts:
    """How the trials of one task ended; `scored` are those that have a reward."""

    ended: int = 0
    scored: int = 0
    reward_sum: float = 0.0
    no_verdict: int = 0
    last_ended_at: float = 0.0


@dataclass
class Minute:
    """How the trials of one minute ended; `scored` are those that have a reward."""

    ended: int = 0
    scored: int = 0
    reward_sum: float = 0.0
    no_verdict: int = 0


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
        self.minutes: dict[int, Minute] = {}

    def load(self) -> None:
        """Begin to read the trials directory, unless that was begun; needs a running loop."""
        if self._loading is None:
            self._loading = asyncio.create_task(self._load(), name="trial-index")

    async def _load(self) -> None:
        made = await asyncio.to_thread(read_all, self._dir, self._most)
        for trial in self._trials.values():  # those that ended in the meantime
            made.add(trial)
        self._trials, self.left_out = made._trials, made.left_out
        self.verdicts, self.tasks, self.minutes = made.verdicts, made.tasks, made.minutes
        self.loaded = True

    def add(self, trial: EndedTrial) -> None:
        """Put a trial at the new end; the oldest goes when there are too many."""
        known = self._trials.pop(trial.trial_id, None)
        if known is not None:
            self._count(known, -1)
        self._trials[trial.trial_id] = trial
        self._count(trial, 1)
        if len(self._trials) > self._most:
            oldest = next(iter(self._trials))
            self._count(self._trials.pop(oldest), -1)
            self.left_out += 1

    def get(self, trial_id: str) -> EndedTrial | None:
        return self._trials.get(trial_id)

    def newest_first(self) -> Iterator[EndedTrial]:
        return reversed(self._trials.values())

    def __len__(self) -> int:
        return len(self._trials)

    def _count(self, trial: EndedTrial, n: int) -> None:
        self.verdicts[(trial.kind, trial.cause)] += n
        reward = trial.reward if trial.reward is not None else 0.0
        scored, missing = (n, 0) if trial.kind != "no_verdict" else (0, n)
        task = self.tasks.setdefault(trial.task or "", TaskCounts())
        task.ended += n
        task.scored += scored
        task.reward_sum += n * reward
        task.no_verdict += missing
        task.last_ended_at = max(task.last_ended_at, trial.ended_at)
        if task.ended == 0:
            del self.tasks[trial.task or ""]
        number, now = int(trial.ended_at // 60), int(time.time() // 60)
        if n > 0 and not now - MINUTES < number <= now + 1:
            return
        minute = self.minutes.get(number) if n < 0 else self.minutes.setdefault(number, Minute())
        if minute is None:
            return
        minute.ended += n
        minute.scored += scored
        minute.reward_sum += n * reward
        minute.no_verdict += missing
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
