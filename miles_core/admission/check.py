"""Checking tasks on an agent server: `nop`, `oracle` and `probe` for each, in this order."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miles_core.admission.cache import CheckCache
from miles_core.admission.digest import has_solution, needs_no_network, task_digest
from miles_core.admission.judge import FINAL, WORLD, Evidence, judge, lacks_solution
from miles_core.admission.report import State, TaskReport
from miles_core.agent_server.client import AgentServerClient
from miles_core.agent_server.protocol import (
    PROBE,
    TrialRequest,
    TrialResult,
    id_problem,
    valid_id,
)
from miles_core.verdicts import Cause

FORGES = ("files", "links")
"""The ways in which the reward is forged, one trial each."""

ATTEMPTS = 2
"""Trials, when the first one ended by no doing of the task."""

NO_NETWORK_SANDBOX = "bubblewrap"
TRIAL_MARGIN_S = 60.0
_POLL_S = 0.2
_SAVE_S = 2.0


@dataclass
class Progress:
    """How far the checks are; `seconds_left` is None until one task was checked."""

    total: int
    done: int = 0
    cached: int = 0
    states: Counter[State] = field(default_factory=Counter)
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds_left(self) -> float | None:
        """An estimate from the tasks that were not in the cache."""
        fresh = self.done - self.cached
        if fresh < 1:
            return None
        return (time.monotonic() - self.began) / fresh * (self.total - self.done)

    def event(self) -> dict[str, Any]:
        """The fields of the journal's event `tasks_checked`."""
        left = self.seconds_left if self.done < self.total else None
        return {
            "done": self.done,
            "total": self.total,
            "refused": self.refused,
            "seconds_left": None if left is None else round(left, 1),
        }

    @property
    def refused(self) -> int:
        """Tasks so far that are not admitted."""
        return self.done - self.states[State.ADMITTED]


class Checker:
    """Checks tasks on one agent server, at most `at_once` at a time.

    `tasks_dir` is the folder of the tasks when it can be read here, or None: nothing is cached
    then. `on_progress` is told after every task, and `interrupted` is called meanwhile; when it
    raises, the trials are ended and the error is passed on. What was found until then is saved.
    """

    def __init__(
        self,
        client: AgentServerClient,
        tasks_dir: Path | None,
        cache: CheckCache,
        at_once: int,
        on_progress: Callable[[Progress], None] = lambda progress: None,
        interrupted: Callable[[], None] = lambda: None,
    ) -> None:
        self._client = client
        self._tasks_dir = tasks_dir
        self._cache = cache
        self._slots = asyncio.Semaphore(at_once)
        self._on_progress = on_progress
        self._interrupted = interrupted
        self._limit_s = 0.0
        self._agent_limit_s = 0.0
        self._offline = False

    async def check(self, names: Iterable[str], recheck: bool = False) -> list[TaskReport]:
        """The reports of tasks in the order of their names; `recheck` looks into no cache."""
        names = sorted(names)
        progress = Progress(len(names))
        reports = {} if recheck else cached_reports(self._tasks_dir, self._cache, names)
        for report in reports.values():
            _count(progress, report)
        progress.cached = len(reports)
        self._on_progress(progress)
        missing = [name for name in names if name not in reports]
        if missing:
            health = await self._client.health()
            self._agent_limit_s = health.agent_timeout_s
            self._offline = health.sandbox == NO_NETWORK_SANDBOX
            self._limit_s = health.trial_timeout_s + TRIAL_MARGIN_S
            for report in await self._check_all(missing, progress):
                reports[report.task] = report
        return [reports[name] for name in names]

    async def _check_all(self, names: list[str], progress: Progress) -> list[TaskReport]:
        running = {asyncio.create_task(self._one(name)) for name in names}
        reports: list[TaskReport] = []
        saved = time.monotonic()
        try:
            while running:
                done, running = await asyncio.wait(
                    running, timeout=_POLL_S, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    report = task.result()
                    reports.append(report)
                    self._cache.put(report)
                    _count(progress, report)
                    self._on_progress(progress)
                self._interrupted()
                if time.monotonic() - saved > _SAVE_S:
                    self._cache.save()
                    saved = time.monotonic()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            self._cache.save()
        return reports

    async def _one(self, name: str) -> TaskReport:
        async with self._slots:
            task_dir = self._tasks_dir / name if self._tasks_dir else None
            if not valid_id(name):  # asked to look into no cache
                return unnamed(name)
            digest = _digest(task_dir) if task_dir else None
            report = judge(name, await self._gather(name, task_dir))
            if task_dir is not None and digest is not None and _digest(task_dir) != digest:
                report.notes.append("the task was changed while it was checked; it is not cached")
                digest = None
            if self._cut_short(report):
                limit = f"the agent server's own limit of {self._agent_limit_s:g} s"
                report.notes.append(f"{limit} ended the solution (--agent-timeout); not cached")
                digest = None
            return report.model_copy(update={"digest": digest})

    def _cut_short(self, report: TaskReport) -> bool:
        """Whether the time limit of this server, not the task's own, ended the solution."""
        oracle = report.oracle
        if oracle is None or oracle.cause != Cause.AGENT_TIMEOUT:
            return False
        return oracle.seconds.get("agent", 0.0) >= self._agent_limit_s

    async def _gather(self, name: str, task_dir: Path | None) -> Evidence:
        """Run what tells something of a task; the first trial may tell that nothing else would."""
        seen = Evidence(proven=task_dir is None or has_solution(task_dir))
        seen.offline = self._offline and not (task_dir and needs_no_network(task_dir))
        seen.nop = await self._trial(name, "nop")
        if seen.nop.verdict.cause in FINAL and seen.nop.reward is None:
            return seen
        if seen.proven:
            oracle = await self._trial(name, "oracle")
            seen.proven = not lacks_solution(oracle)
            if seen.proven:
                seen.oracle = oracle
                if oracle.verdict.cause in FINAL and oracle.reward is None:
                    return seen
        for index, kind in enumerate(FORGES):
            seen.probes.append(await self._trial(name, PROBE, forge=kind, look=index == 0))
        return seen

    async def _trial(self, name: str, agent: str, **fields: str | bool) -> TrialResult:
        request = TrialRequest.model_validate({"instance_id": name, "agent_name": agent, **fields})
        for attempt in range(ATTEMPTS):
            trial_id = f"check-{uuid.uuid4().hex[:12]}-{agent}"
            result = await self._client.run(trial_id, request, self._limit_s)
            if result.verdict.cause not in WORLD or attempt == ATTEMPTS - 1:
                break
        return result


def _count(progress: Progress, report: TaskReport) -> None:
    progress.done += 1
    progress.states[report.state] += 1


def unnamed(name: str) -> TaskReport:
    """The report of a folder whose name can be no task id."""
    return TaskReport(
        task=name,
        state=State.FAILED,
        reasons=[f"the folder's name is no task id: {id_problem(name)}"],
        fixes=["rename the folder"],
    )


def cached_reports(
    tasks_dir: Path | None, cache: CheckCache, names: Iterable[str]
) -> dict[str, TaskReport]:
    """The reports of tasks as they are now that need no trial: those that a cache has."""
    if tasks_dir is None:
        return {}
    found = {}
    for name in names:
        if not valid_id(name):
            found[name] = unnamed(name)
            continue
        digest = _digest(tasks_dir / name)
        report = cache.get(name, digest) if digest is not None else None
        if report is not None:
            found[name] = report
    return found


def _digest(task_dir: Path) -> str | None:
    """The digest of a task; None for one that cannot be read, of which the server tells more."""
    try:
        return task_digest(task_dir)
    except OSError:
        return None
