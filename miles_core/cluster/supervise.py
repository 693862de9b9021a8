"""Supervision of a run's training: submit or attach, watch the disk, tell how an attempt ended.

The Ray job is the run; this may die at any time. Success, stall and progress are read from the run
directory alone. Nothing here knows Prefect.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_core.cluster import local_client
from miles_core.cluster.jobs import (
    ClusterUnreachable,
    Job,
    RayJobs,
    attach_or_submit,
    driver_entrypoint,
)
from miles_core.cluster.local import needs_agent_server, needs_ray
from miles_core.errors import UserError
from miles_core.runs.directory import RunDir
from miles_core.runs.files import read_json, write_json
from miles_core.runs.fold import RunState
from miles_core.runs.journal import Journal, Tail, read
from miles_core.runs.status import stall_limit_s

if TYPE_CHECKING:
    from miles_core.config.schema import MilesConfig

log = logging.getLogger(__name__)

POLL_S = 1.0
_STOP_LAG_S = 15.0  # until Ray tells of the end of a driver that it has killed
_TAIL_LINES = 15
_LINES_PER_POLL = 20
_GRANT = "granted.json"


class AttemptFailed(RuntimeError):
    """An attempt ended without completing the run, and another one may be made."""


class TrainingCrashed(AttemptFailed):
    """The Ray job died."""


class TrainingStalled(AttemptFailed):
    """No new event for too long; the job was stopped."""


class TrainingFailed(UserError):
    """The run cannot go on by itself: the driver gave up, or no attempt is left."""


class StoppedOutside(UserError):
    """Somebody stopped the Ray job, not through Miles Flow."""


class RunCancelled(Exception):
    """The run was cancelled; its job has been stopped."""


def job_stop_s(config: MilesConfig) -> float:
    """Seconds within which a job has ended that was asked to stop."""
    return config.cluster.stop_wait_s + _STOP_LAG_S


def stop_file(run: RunDir) -> Path:
    """Whoever writes this file asks the supervisor to cancel the run."""
    return run.path / "STOP"


def stop_reason(run: RunDir) -> str | None:
    """What the stop file says, or None without one."""
    try:
        return stop_file(run).read_text().strip() or "asked by the file STOP"
    except FileNotFoundError:
        return None


def grant_attempts(run: RunDir) -> None:
    """A person starts the run again: attempts so far no longer count against its limit."""
    if run.last_attempt():
        write_json(run.attempts / _GRANT, {"after": run.last_attempt()})


def attempts_without_progress(run: RunDir, steps_done: int) -> int:
    """Newest attempts in a row that started with as many trained steps as there are now."""
    grant = run.attempts / _GRANT
    first = read_json(grant)["after"] if grant.is_file() else 0
    count = 0
    for attempt in range(run.last_attempt(), first, -1):
        record = run.attempt_dir(attempt) / "ray_job.json"
        if record.is_file() and read_json(record)["steps_done"] < steps_done:
            break
        count += 1
    return count


class LogFollower:
    """Passes new lines of a growing file on, at most `_LINES_PER_POLL` a call."""

    def __init__(self, path: Path, from_end: bool) -> None:
        self.path = path
        self._offset = path.stat().st_size if from_end and path.exists() else 0

    def forward(self, write: Callable[[str], None]) -> None:
        """Write what is new; what is too much is counted and left in the file."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
        complete = text.rfind(b"\n") + 1
        self._offset += complete
        lines = text[:complete].decode(errors="replace").splitlines()
        for line in lines[:_LINES_PER_POLL]:
            write(line)
        if len(lines) > _LINES_PER_POLL:
            write(f"... {len(lines) - _LINES_PER_POLL} more lines in {self.path}")


def tail_text(path: Path, lines: int = _TAIL_LINES) -> str:
    """The last lines of a log, or a remark that there is none."""
    if not path.is_file():
        return f"({path} does not exist)"
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 16 * 1024))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])


class Supervisor:
    """Drives the attempts of one run. The caller holds the run's lock.

    `cancelled` returns a reason to cancel, or nothing; it must not block. `on_event` sees every
    new event of the journal, and `write` the driver's log.
    """

    def __init__(
        self,
        run: RunDir,
        config: MilesConfig,
        cancelled: Callable[[], str | None] = lambda: None,
        write: Callable[[str], None] = log.info,
        on_event: Callable[[dict[str, Any], RunState], None] = lambda event, state: None,
        entrypoint: Callable[[RunDir, int], list[str]] = driver_entrypoint,
    ) -> None:
        self.run = run
        self.config = config
        self._cancelled = cancelled
        self._write = write
        self._on_event = on_event
        self._entrypoint = entrypoint
        self._tail = Tail(run.journal)
        self._state = RunState()
        self._read_events(announce=False)

    def _read_events(self, announce: bool = True) -> bool:
        events = self._tail.new()
        for event in events:
            self._state.apply(event)
            if announce:
                self._on_event(event, self._state)
        return bool(events)

    def _journal(self, event: str, **fields: Any) -> None:
        with Journal(self.run.journal) as journal:
            journal.append(event, **fields)
        self._read_events()

    def _check_cancel(self) -> None:
        reason = stop_reason(self.run) or self._cancelled()
        if reason:
            raise RunCancelled(reason)

    def follow_attempt(self) -> None:
        """One attempt, from attaching or submitting to its end; returns when the run is complete.

        Raises AttemptFailed when another attempt may be made, else TrainingFailed,
        StoppedOutside, RunCancelled, or UserError from the cluster.
        """
        self._read_events()
        if self.complete:
            return
        job_ref: list[Job] = []
        cluster = None
        try:
            cluster = local_client.wait_ready(self.run, self.config, interrupted=self._check_cancel)
            self._record_agent_server(cluster.agent_server_url)
            with cluster.jobs() as jobs:
                self._follow(jobs, job_ref)
        except RunCancelled as cancel:
            if cluster is not None and job_ref:
                self._stop_job(cluster, job_ref[0])
            self._read_events()
            if self.complete:  # the last step was done before the stop could end anything
                return
            self._journal("run_ended", state="cancelled", detail=str(cancel))
            raise
        except TrainingStalled as stall:
            if cluster is not None and job_ref:
                self._stop_job(cluster, job_ref[0])
            self._end_attempt(stall, final_state="stalled")
        except (TrainingCrashed, ClusterUnreachable, local_client.ClusterNotReady) as crash:
            self._end_attempt(crash, final_state="failed")

    @property
    def complete(self) -> bool:
        """Whether the disk says that all steps are trained and the run has ended so."""
        return self._state.completed(self.config.rollout.num_rollout)

    def _record_agent_server(self, url: str) -> None:
        path = self.run.path / "inputs.json"
        inputs = read_json(path)
        if inputs.get("agent_server_url") != url:
            write_json(path, {**inputs, "agent_server_url": url})

    def _attempts_used_up(self) -> bool:
        used = attempts_without_progress(self.run, self._state.steps_done)
        return used >= self.config.cluster.max_run_attempts

    def _attach(self, jobs: RayJobs) -> tuple[Job, int, bool]:
        """The job to follow, its attempt, and whether it was there already."""
        before = self.run.last_attempt()
        if self._attempts_used_up() and jobs.live(self.run.identity()["id"]) is None:
            raise TrainingFailed(
                f"{self.config.cluster.max_run_attempts} attempts in a row made no progress",
                f"See {self.run.attempt_dir(before)}, then `miles resume {self.run.path}`.",
            )
        job, attempt = attach_or_submit(jobs, self.run, self._entrypoint)
        if attempt <= before:
            self._write(f"attached to the live Ray job {job.id}")
            return job, attempt, True
        write_json(
            self.run.attempt_dir(attempt) / "ray_job.json",
            {
                "submission_id": job.id,
                "url": jobs.url,
                "submitted": time.time(),
                "steps_done": self._state.steps_done,
            },
        )
        self._write(f"submitted the Ray job {job.id}")
        return job, attempt, False

    def _follow(self, jobs: RayJobs, job_ref: list[Job]) -> None:
        job, attempt, attached = self._attach(jobs)
        job_ref.append(job)
        folder = self.run.attempt_dir(attempt)
        follower = LogFollower(folder / "driver.log", from_end=attached)
        head = local_client.own_pid(self.run, "ray")
        quiet_since = self._state.last_event if attached else None
        quiet_since = quiet_since or time.time()
        while True:
            job = self._poll(jobs, job, head)
            follower.forward(self._write)
            if self._read_events():
                quiet_since = time.time()
            if not job.live:
                follower.forward(self._write)
                self._read_events()
                self._judge(job, folder)
                return
            self._check_cancel()
            limit = self._stall_limit(attempt)
            if time.time() - quiet_since > limit:
                raise TrainingStalled(f"no new event for {limit:.0f} s; the job was stopped")
            time.sleep(POLL_S)

    def _stall_limit(self, attempt: int) -> float:
        part = self.config.cluster
        if self._state.attempt != attempt:
            return part.stall_seconds + part.first_step_grace_s
        return stall_limit_s(self._state, part.stall_seconds, part.first_step_grace_s)

    def _poll(self, jobs: RayJobs, job: Job, head: int | None) -> Job:
        """The job now. A cluster of the run's own that is gone has lost its job; another
        cluster may come back, and the stall limit bounds the wait."""
        own = needs_ray(self.config)
        if own and local_client.own_pid(self.run, "ray") != head:
            raise TrainingCrashed("the run's Ray head ended, and the job with it")
        if (own or needs_agent_server(self.config)) and local_client.guardian(self.run) is None:
            if own:
                raise TrainingCrashed("the guardian of the local cluster ended, its job too")
            local_client.start(self.run, self.config)
        try:
            found = jobs.get(job.id)
        except ClusterUnreachable as error:
            log.debug("%s", error)
            return job
        if found is None:
            raise TrainingCrashed(f"the cluster at {jobs.url} no longer knows the job {job.id}")
        return found

    def _judge(self, job: Job, folder: Path) -> None:
        """What the end of a job means; the driver's own record decides before Ray's status."""
        record = folder / "exit.json"
        ending = read_json(record) if record.is_file() else {"state": None, "detail": ""}
        if ending["state"] == "completed" and self.complete:
            return
        if ending["state"] == "failed":
            raise TrainingFailed(ending["detail"] or "the driver gave up", f"See {folder}.")
        self._check_cancel()
        if job.status == "STOPPED":
            raise StoppedOutside(
                f"the Ray job {job.id} was stopped from outside",
                f"Go on with `miles resume {self.run.path}`.",
            )
        reason = ending["detail"] or job.message or "no reason was recorded"
        raise TrainingCrashed(
            f"the Ray job {job.id} ended ({job.status.lower()}): {reason}\n"
            f"{tail_text(folder / 'driver.log')}"
        )

    def _stop_job(self, cluster: local_client.Cluster, job: Job) -> None:
        try:
            with cluster.jobs() as jobs:
                jobs.stop(job.id, job_stop_s(self.config))
        except ClusterUnreachable as error:
            self._write(f"could not stop {job.id}: {error}")
        self._read_events()

    def _end_attempt(self, error: Exception, final_state: str) -> None:
        """Journal the end of an attempt; raise `error`, or TrainingFailed after the last one."""
        detail = str(error).splitlines()[0]
        if not self._attempts_used_up():
            if self._state.state != "interrupted":
                self._journal("run_ended", state="interrupted", detail=detail)
            if isinstance(error, AttemptFailed):
                raise error
            raise TrainingCrashed(detail) from error
        self._journal("run_ended", state=final_state, detail=detail)
        count = self.config.cluster.max_run_attempts
        raise TrainingFailed(
            f"{error}\nNo attempt is left: {count} in a row made no progress.",
            f"Put it right, then `miles resume {self.run.path}`.",
        ) from error


def free_trials(run: RunDir, url: str, token: str) -> int:
    """End the trials that the journal still has as running; returns how many were asked to end.

    Only an agent server that is not the run's own can still have them. Best effort: a trial that
    cannot be reached ends with its lease.
    """
    import httpx

    open_trials: set[str] = set()
    for event in read(run.journal):
        if event["event"] == "trial_started":
            open_trials.add(event["trial_id"])
        elif event["event"] == "trial_ended":
            open_trials.discard(event["trial_id"])
    headers = {"Authorization": f"Bearer {token}"}
    asked = 0
    with httpx.Client(base_url=url, headers=headers, timeout=10.0, trust_env=False) as http:
        for trial_id in sorted(open_trials):
            try:
                http.delete(f"/trials/{trial_id}")
                asked += 1
            except httpx.TransportError as error:
                log.warning("%s is left to its lease: %s", trial_id, error)
                break
    return asked
