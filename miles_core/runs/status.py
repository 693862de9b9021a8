"""What a run is doing, read from its directory alone."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from miles_core.runs.directory import RunDir
from miles_core.runs.files import read_json
from miles_core.runs.fold import FINAL_STATES, RunState, fold
from miles_core.runs.journal import read
from miles_core.runs.lock import holder

_RECENT_STEPS = 10


@dataclass(frozen=True)
class RunStatus:
    """The answer of `miles status RUN --json`.

    `state` is `running`, `completed`, `failed`, `stalled` or `cancelled`. `reward_mean` has one
    entry per trained step (None: the step had no reward). `verdicts` counts trials: `graded`, else
    by cause. `trials` counts those of the current step by state now. Times are in seconds;
    `eta_s` is None while it cannot be told.
    """

    state: str
    steps_done: int
    steps_total: int
    reward_mean: list[float | None]
    verdicts: dict[str, int]
    weight_version: int | None
    last_event_age_s: float
    eta_s: float | None
    alarms: list[dict[str, Any]]
    stage: str | None
    step: int | None
    trials: dict[str, int]
    attempt: int
    detail: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def eta_s(state: RunState, now: float) -> float | None:
    """Seconds until the last step is trained, from the pace of this attempt's recent steps."""
    if state.steps_total is None or state.state != "running":
        return None
    ends = state.step_ends[-_RECENT_STEPS - 1 :]
    if not ends:
        return None
    if len(ends) > 1:
        pace = (ends[-1] - ends[0]) / (len(ends) - 1)
    elif state.attempt_started is not None:
        pace = ends[0] - state.attempt_started
    else:
        return None
    remaining = max(0, state.steps_total - state.steps_done)
    return max(0.0, remaining * pace - min(now - ends[-1], pace))


def stall_limit_s(state: RunState, stall_seconds: float, first_step_grace_s: float) -> float:
    """Silence that is a stall; starting up gets `first_step_grace_s` more.

    Starting up lasts until the first step of an attempt is trained.
    """
    return stall_seconds + (0.0 if state.step_ends else first_step_grace_s)


def last_event_age_s(run: RunDir, state: RunState, now: float) -> float:
    """Seconds since the newest event; without any, since the run was made."""
    last = state.last_event if state.last_event is not None else run.identity()["created"]
    return max(0.0, now - last)


def status(run_dir: RunDir | str | Path, now: float | None = None) -> RunStatus:
    """The status of a run; reads its directory and nothing else.

    A run without an end in the journal is `running` until its last event is older than
    `stall_limit_s`. After an interrupted attempt it is `stalled` as soon as no supervisor holds
    the lock, and after a failed one it is `failed` only when no supervisor is there to try again.
    Raises UserError when the directory is no run or its journal is damaged.
    """
    run = run_dir if isinstance(run_dir, RunDir) else RunDir(run_dir)
    run.identity()
    return status_of(run, fold(read(run.journal)), time.time() if now is None else now)


def status_of(run: RunDir, state: RunState, now: float) -> RunStatus:
    """The status for a state that was folded already."""
    config = read_json(run.config_json)
    age = last_event_age_s(run, state, now)
    limit = stall_limit_s(
        state, config["cluster"]["stall_seconds"], config["cluster"]["first_step_grace_s"]
    )
    detail = state.detail
    retrying = state.state == "failed" and holder(run) is not None
    if state.state in FINAL_STATES and not retrying:
        shown, eta = state.state, 0.0 if state.state == "completed" else None
    elif age > limit:
        shown, eta = "stalled", None
        detail = f"no event for {age:.0f} s (limit {limit:.0f} s)"
    elif state.state == "interrupted" and holder(run) is None:
        shown, eta = "stalled", None
        detail = f"interrupted, and nothing drives the run: {state.detail}".rstrip(": ")
    else:
        shown, eta = "running", eta_s(state, now)
    total = state.steps_total
    return RunStatus(
        state=shown,
        steps_done=state.steps_done,
        steps_total=config["rollout"]["num_rollout"] if total is None else total,
        reward_mean=state.reward_mean,
        verdicts=dict(state.verdicts),
        weight_version=state.weight_version,
        last_event_age_s=age,
        eta_s=eta,
        alarms=state.alarms,
        stage=state.stage,
        step=state.step,
        trials=dict(state.trials),
        attempt=state.attempt,
        detail=detail,
    )
