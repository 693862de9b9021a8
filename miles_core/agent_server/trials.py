"""The trials of one server: queue, leases, results that outlive the process.

Each trial has a directory `TRIALS_DIR/<id>`: `started.json` when it was accepted, `result.json`
when it has ended. A trial with the first and without the second was running when its server died.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from miles_core.agent_server.hiding import hide, secrets_of, without
from miles_core.agent_server.protocol import (
    Phase,
    TrialRequest,
    TrialResult,
    TrialState,
    TrialStatus,
)
from miles_core.agent_server.queueing import QueueEstimate
from miles_core.agent_server.runner import Runner
from miles_core.agent_server.same_trial import TrialConflict, differing, digests
from miles_core.agent_server.tasks import one_line
from miles_core.agent_server.trials_dir import TrialsDir
from miles_core.verdicts import Cause, Verdict

LEASE_CHECK_S = 0.5
CANCEL_WAIT_S = 50.0

SHOWN = {
    *("model", "sampling_params", "max_seq_len", "max_turns", "lease_s"),
    *("session_server_id", "session_server_instance_id"),
}
"""What is kept of a request for people to see: `base_url` holds a secret, and metadata may."""


class UnknownTrial(LookupError):
    """No trial of this id was ever started here."""


@dataclass
class Record:
    """A trial that this process runs."""

    trial_id: str
    request: TrialRequest
    digests: dict[str, str]
    created: float
    renewed: float
    phase: Phase = Phase.QUEUED
    phase_began: float = field(default_factory=time.monotonic)
    waiting: int = 0
    end_cause: Cause | None = None
    end_detail: str = ""
    result: TrialResult | None = None
    task: asyncio.Task[None] | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class TrialManager:
    """Accepts trials, runs at most `capacity` at once, keeps what they ended with."""

    def __init__(self, runner: Runner, trials_dir: Path, capacity: int) -> None:
        self._runner = runner
        self._kept = TrialsDir(trials_dir)
        self.capacity = capacity
        self._slots = asyncio.Semaphore(capacity)
        self._live: dict[str, Record] = {}
        self._queue = QueueEstimate(capacity)
        self._leases: asyncio.Task[None] | None = None
        self.stopping = asyncio.Event()
        self.watchers: list[Callable[[Record], None]] = []
        """Called with each trial that has ended, after its result was kept."""
        self.given: list[Callable[[str], None]] = []
        """Called with the id of a trial whose result a client is given."""

    # ---- life of the server --------------------------------------------------------

    def open(self) -> list[str]:
        """Start. Trials that an earlier process left unfinished end here; returns their ids."""
        self._kept.open()
        lost = list(self._kept.unfinished())
        for trial_id in lost:
            verdict = Verdict.no_verdict(
                Cause.SERVER_RESTARTED, "the agent server ended while the trial was running"
            )
            self._kept.keep(TrialResult.of(trial_id, verdict))
        self._leases = asyncio.create_task(self._watch_leases(), name="leases")
        return lost

    async def close(self) -> None:
        """End every trial and wait for their sandboxes to be gone."""
        self.stopping.set()
        if self._leases is not None:
            self._leases.cancel()
        for record in list(self._live.values()):
            self._end(record, Cause.SERVER_RESTARTED, "the agent server was stopped")
        tasks = [record.task for record in self._live.values() if record.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=CANCEL_WAIT_S)

    def problem(self) -> str | None:
        """Why no trial can be kept any more; None while they can."""
        return self._kept.problem()

    # ---- what the routes call ------------------------------------------------------

    def start(self, trial_id: str, request: TrialRequest) -> TrialStatus:
        """Start a trial, or join that of this id. Raises QueueFull, TrialConflict or CannotKeep."""
        asked = digests(trial_id, request)
        live = self._live.get(trial_id)
        if live is not None or self._kept.knows(trial_id):
            known = live.digests if live is not None else self._kept.digests(trial_id)
            fields = differing(known, asked)
            if fields:
                raise TrialConflict(trial_id, fields)
            return self.status(trial_id)
        self._queue.check(len(self._live), request.deadline_s)
        now = time.monotonic()
        record = Record(trial_id, request, asked, now, now)
        started = {
            "trial_id": trial_id,
            "instance_id": request.instance_id,
            "agent_name": request.agent_name,
            "session_server_instance_id": request.session_server_instance_id,
            "created_at": time.time(),
            "request": request.model_dump(include=SHOWN, exclude_none=True),
            "digests": asked,
        }
        self._kept.begin(trial_id, started)
        self._live[trial_id] = record
        record.task = asyncio.create_task(self._run(record), name=f"trial-{trial_id}")
        record.task.add_done_callback(lambda task: self._ended(record))
        return self._status(record)

    def status(self, trial_id: str) -> TrialStatus:
        """A trial's status; renews its lease. Raises UnknownTrial."""
        known = self._find(trial_id)
        if known is None:
            raise UnknownTrial(trial_id)
        return known

    async def wait(self, trial_id: str, wait_s: float) -> TrialStatus:
        """The status when the trial has ended, or after `wait_s` seconds."""
        record = self._live.get(trial_id)
        if record is not None and wait_s > 0 and not self.stopping.is_set():
            record.waiting += 1
            try:
                events = [
                    asyncio.ensure_future(record.ended.wait()),
                    asyncio.ensure_future(self.stopping.wait()),
                ]
                try:
                    await asyncio.wait(events, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for event in events:
                        event.cancel()
            finally:
                record.waiting -= 1
                record.renewed = time.monotonic()
        return self.status(trial_id)

    async def cancel(self, trial_id: str) -> TrialStatus:
        """End a trial; answers when it has ended, or after `CANCEL_WAIT_S`. Raises UnknownTrial."""
        record = self._live.get(trial_id)
        if record is not None:
            self._end(record, Cause.CANCELLED, "cancelled by a request")
            await _until_ended([record])
        return self.status(trial_id)

    async def flush(self, session_server_instance_id: str) -> list[str]:
        """End every trial of one trainer; the ids that were ended."""
        theirs = [
            record
            for record in self._live.values()
            if record.request.session_server_instance_id == session_server_instance_id
        ]
        for record in theirs:
            self._end(record, Cause.CANCELLED, "flushed")
        await _until_ended(theirs)
        return [record.trial_id for record in theirs]

    def counts(self) -> tuple[int, int]:
        """How many trials are running and how many are queued."""
        queued = sum(record.phase is Phase.QUEUED for record in self._live.values())
        return len(self._live) - queued, queued

    def live(self) -> list[Record]:
        """The trials that have not ended, the oldest first, to be read and not changed."""
        return list(self._live.values())

    def ids(self) -> list[str]:
        """The ids of the trials that have not ended."""
        return list(self._live)

    # ---- inside --------------------------------------------------------------------

    async def _run(self, record: Record) -> None:
        """The life of one trial: it always ends with a result."""
        secrets = secrets_of(record.request)
        try:
            result = await self._verdict(record)
            problem = self._kept.problem(record.trial_id)
            if problem:  # what the verifier wrote may be lost: no grade can be taken
                verdict = Verdict.no_verdict(Cause.INTERNAL_ERROR, problem)
                result = TrialResult.of(record.trial_id, verdict)
            record.result = without(result, secrets)
        except asyncio.CancelledError:
            pass  # _ended knows why
        finally:
            if secrets:
                await asyncio.to_thread(hide, self._kept.root / record.trial_id / "harbor", secrets)

    async def _verdict(self, record: Record) -> TrialResult:
        """Run a trial when it has its turn."""
        try:
            async with self._slots:
                record.phase, record.phase_began = Phase.ENVIRONMENT, time.monotonic()

                def enter(phase: Phase) -> None:
                    record.phase, record.phase_began = phase, time.monotonic()

                began = time.monotonic()
                result = await self._runner.run(record.trial_id, record.request, enter)
                self._queue.ended(time.monotonic() - began)
                return result
        except Exception as error:  # nothing may leave a trial without a result
            verdict = Verdict.no_verdict(Cause.INTERNAL_ERROR, one_line(error, 500))
            return TrialResult.of(record.trial_id, verdict)

    def _ended(self, record: Record) -> None:
        """Keep the result of a trial whose task is done, also of one that never began."""
        if record.result is None:
            verdict = Verdict.no_verdict(record.end_cause or Cause.CANCELLED, record.end_detail)
            record.result = TrialResult.of(record.trial_id, verdict)
        record.phase = Phase.ENDED
        self._kept.keep(record.result)
        record.ended.set()
        self._live.pop(record.trial_id, None)
        for watcher in self.watchers:
            watcher(record)

    def _end(self, record: Record, cause: Cause, detail: str) -> None:
        if record.task is not None and record.end_cause is None and not record.ended.is_set():
            record.end_cause, record.end_detail = cause, detail
            record.task.cancel()

    async def _watch_leases(self) -> None:
        while True:
            await asyncio.sleep(LEASE_CHECK_S)
            self._kept.flush()
            now = time.monotonic()
            for record in list(self._live.values()):
                lease = record.request.lease_s
                if not record.waiting and now - record.renewed > lease:
                    self._end(record, Cause.LEASE_EXPIRED, f"not asked for in {lease:.0f} s")

    def _find(self, trial_id: str) -> TrialStatus | None:
        record = self._live.get(trial_id)
        if record is not None:
            record.renewed = time.monotonic()
            return self._status(record)
        found = self._kept.result(trial_id)
        if found is None:
            return None
        for tell in self.given:
            tell(trial_id)
        return TrialStatus(
            trial_id=trial_id,
            state=TrialState.ENDED,
            phase=Phase.ENDED,
            age_s=round(found[1], 3),
            result=found[0],
        )

    def _status(self, record: Record) -> TrialStatus:
        state, position = TrialState.RUNNING, None
        if record.phase is Phase.QUEUED:
            state = TrialState.QUEUED
            queued = [r for r in self._live.values() if r.phase is Phase.QUEUED]
            position = queued.index(record)
        elif record.phase is Phase.ENDED:
            state = TrialState.ENDED
        return TrialStatus(
            trial_id=record.trial_id,
            state=state,
            phase=record.phase,
            queue_position=position,
            age_s=round(time.monotonic() - record.created, 3),
            result=record.result if state is TrialState.ENDED else None,
        )


async def _until_ended(records: list[Record]) -> None:
    """Wait for trials that were ended; one that takes too long is left to its own bounds."""
    waits = [asyncio.ensure_future(record.ended.wait()) for record in records]
    if waits:
        _, late = await asyncio.wait(waits, timeout=CANCEL_WAIT_S)
        for wait in late:
            wait.cancel()
