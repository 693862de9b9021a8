"""The data of the page, from the live trials of the server and the index of the ended ones.

Times are seconds since 1970 and never ages, so that an answer changes only when a trial does.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any, Protocol

from miles_core.agent_server.dashboard.index import EndedTrial, TrialIndex, of_result
from miles_core.agent_server.dashboard.trajectory import Live
from miles_core.agent_server.hiding import secrets_of
from miles_core.agent_server.protocol import Phase, TrialState
from miles_core.agent_server.trials import SHOWN, Record, TrialManager
from miles_core.verdicts import Cause, VerdictKind

FACTS = ("capacity", "sandbox", "harbor_version", "agent_timeout_s", "trial_timeout_s")
"""What is shown of the unchanging parts of the server's health."""


class Talk(Protocol):
    """What an agent at work has said and seen; see `agents.job.Conversation`."""

    count: int
    runs: int

    def messages(self) -> list[dict[str, Any]]:
        """The last messages, as OpenAI has them."""


class Working(Protocol):
    """An agent that is at work."""

    @property
    def conversation(self) -> Talk:
        """Empty where it is not seen."""

    @property
    def turns(self) -> int | None:
        """Its answered model calls; None where they are not seen."""


class DashboardView:
    """What the dashboard shows of one server.

    `facts` are the unchanging parts of the server's health, `jobs` the agents that are at work, by
    trial id.
    """

    def __init__(
        self,
        manager: TrialManager,
        index: TrialIndex,
        facts: dict[str, Any],
        jobs: Mapping[str, Working],
    ) -> None:
        self._manager = manager
        self._index = index
        self._jobs = jobs
        self._facts = {name: facts[name] for name in FACTS}
        self._started_at = round(time.time(), 3)
        self._clock = time.time() - time.monotonic()
        manager.watchers.append(self._ended)

    def overview(self) -> dict[str, Any]:
        """Counts of all trials, those of each of the last minutes, and facts of the server."""
        self._index.load()
        live = Counter(record.phase for record in self._manager.live())
        queued = live.pop(Phase.QUEUED, 0)
        index = self._index
        return {
            "server": {
                **self._facts,
                "status": "stopping" if self._manager.stopping.is_set() else "ready",
                "started_at": self._started_at,
            },
            "running": live.total(),
            "queued": queued,
            "phases": {phase.value: live[phase] for phase in Phase if live[phase]},
            "ended": len(index),
            "loaded": index.loaded,
            "left_out": index.left_out,
            "verdicts": [
                {"kind": kind, "cause": cause, "count": count}
                for (kind, cause), count in index.verdicts.most_common()
                if count
            ],
            "minutes": [
                {"minute": number, **asdict(minute)}
                for number, minute in sorted(index.minutes.items())
            ],
        }

    def trials(
        self,
        state: TrialState | None,
        phase: Phase | None,
        kind: VerdictKind | None,
        cause: Cause | None,
        task: str,
        offset: int,
        limit: int,
    ) -> dict[str, Any]:
        """One page of the list: running, then queued, then the newest ended; `total` matched."""
        self._index.load()
        part = task.lower()
        matched: list[Record | EndedTrial] = []
        if kind is None and cause is None and state is not TrialState.ENDED:
            matched += [
                record
                for record in self._live_in_order()
                if state in (None, _state(record))
                and phase in (None, record.phase)
                and _named(part, record.request.instance_id, record.trial_id)
            ]
        if state in (None, TrialState.ENDED) and phase in (None, Phase.ENDED):
            matched += self._ended_matching(kind, cause, part)
        rows = [self._row(one) for one in matched[offset : offset + limit]]
        return {"total": len(matched), "offset": offset, "trials": rows}

    def _ended_matching(
        self, kind: VerdictKind | None, cause: Cause | None, part: str
    ) -> Iterator[EndedTrial]:
        for trial in self._index.newest_first():
            if kind is not None and trial.kind != kind:
                continue
            if cause is not None and trial.cause != cause:
                continue
            if _named(part, trial.task or "", trial.trial_id):
                yield trial

    def tasks(self, task: str, offset: int, limit: int) -> dict[str, Any]:
        """One page of the tasks that trials have ended of, the latest first."""
        self._index.load()
        part = task.lower()
        names = [name for name in self._index.tasks if part in name.lower()]
        names.sort(key=lambda name: -self._index.tasks[name].last_ended_at)
        rows = [
            {"task": name, **asdict(self._index.tasks[name])}
            for name in names[offset : offset + limit]
        ]
        return {"total": len(names), "offset": offset, "tasks": rows}

    def row(self, trial_id: str) -> dict[str, Any] | None:
        """The line of one trial, or None."""
        self._index.load()
        for record in self._manager.live():
            if record.trial_id == trial_id:
                return self._row(record)
        ended = self._index.get(trial_id)
        return self._row(ended) if ended is not None else None

    def request(self, trial_id: str) -> tuple[dict[str, Any] | None, list[str]]:
        """What may be shown of a live trial's request, and the secrets that are in it."""
        for record in self._manager.live():
            if record.trial_id == trial_id:
                secrets = secrets_of(record.request)
                return record.request.model_dump(include=SHOWN, exclude_none=True), secrets
        return None, []

    def live(self, trial_id: str) -> Live | None:
        """What the agent of a live trial has said and seen so far, where that is seen."""
        job = self._jobs.get(trial_id)
        if job is None or not job.conversation.runs:
            return None
        talk = job.conversation
        return Live(talk.runs, talk.count, talk.messages())

    def _live_in_order(self) -> list[Record]:
        live = self._manager.live()
        return sorted(live, key=lambda record: record.phase is Phase.QUEUED)

    def _row(self, trial: Record | EndedTrial) -> dict[str, Any]:
        if isinstance(trial, EndedTrial):
            return {"state": "ended", "phase": "ended", "phase_began_at": None, **asdict(trial)}
        job = self._jobs.get(trial.trial_id)
        return {
            "state": _state(trial).value,
            "phase": trial.phase.value,
            "phase_began_at": round(trial.phase_began + self._clock, 3),
            "trial_id": trial.trial_id,
            "task": trial.request.instance_id,
            "agent": trial.request.agent_name,
            "kind": None,
            "cause": None,
            "reward": None,
            "turns": job.turns if job is not None else None,
            "seconds": None,
            "created_at": round(trial.created + self._clock, 3),
            "ended_at": None,
        }

    def _ended(self, record: Record) -> None:
        """Take a trial that has ended into the index."""
        assert record.result is not None
        request, created_at = record.request, round(record.created + self._clock, 3)
        self._index.add(
            of_result(
                record.result,
                request.instance_id,
                request.agent_name,
                created_at,
                round(time.time(), 3),
            )
        )


def _state(record: Record) -> TrialState:
    return TrialState.QUEUED if record.phase is Phase.QUEUED else TrialState.RUNNING


def _named(part: str, task: str, trial_id: str) -> bool:
    return not part or part in task.lower() or part in trial_id.lower()
