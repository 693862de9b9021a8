"""The state of a run, folded from its journal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

FINAL_STATES = ("completed", "failed", "cancelled", "stalled")


@dataclass
class RunState:
    """What the events so far say.

    `state` is `new` before the first event, `running`, `interrupted` (an attempt ended and the
    run may go on) or one of `FINAL_STATES`. `rewards` maps a trained step to its mean reward.
    `trials` counts the trials of the current step by state now: `running`, and ended ones by
    verdict. `verdicts` counts each trial once over the whole run: `graded`, else its cause.
    `stage_seconds` sums the time of ended stages over all attempts.
    """

    state: str = "new"
    detail: str = ""
    attempt: int = 0
    steps_total: int | None = None
    rewards: dict[int, float | None] = field(default_factory=dict)
    verdicts: Counter[str] = field(default_factory=Counter)
    weight_version: int | None = None
    checkpoint: int | None = None
    stage: str | None = None
    step: int | None = None
    trials: Counter[str] = field(default_factory=Counter)
    alarms: list[dict[str, Any]] = field(default_factory=list)
    stage_seconds: dict[str, float] = field(default_factory=dict)
    dropped_groups: int = 0
    first_event: float | None = None
    last_event: float | None = None
    attempt_started: float | None = None
    step_ends: list[float] = field(default_factory=list)
    trial_steps: dict[str, int] = field(default_factory=dict)
    _open: dict[str, int] = field(default_factory=dict)
    _ended: dict[str, str] = field(default_factory=dict)

    @property
    def steps_done(self) -> int:
        return len(self.rewards)

    def completed(self, steps: int) -> bool:
        """Whether the run has ended with all of `steps` trained; more may be asked for later."""
        return self.state == "completed" and self.steps_done >= steps

    @property
    def reward_mean(self) -> list[float | None]:
        """Mean reward by step; None for a step that had none."""
        return [self.rewards.get(step) for step in range(max(self.rewards, default=-1) + 1)]

    def apply(self, event: dict[str, Any]) -> None:
        """Take one event in; an unknown kind changes nothing but the time of the last event."""
        self.last_event = event["time"]
        if self.first_event is None:
            self.first_event = event["time"]
        handler = _HANDLERS.get(event["event"])
        if handler is not None:
            handler(self, event)

    def _run_started(self, event: dict[str, Any]) -> None:
        self.state, self.detail = "running", ""
        self.attempt = event["attempt"]
        self.steps_total = event["steps_total"]
        self.attempt_started = event["time"]
        self.step_ends.clear()
        self.rewards = {s: r for s, r in self.rewards.items() if s < event["from_step"]}
        self._open.clear()
        self._enter_step(event["from_step"])

    def _enter_step(self, step: int) -> None:
        """Go to a step; its trials of an earlier attempt show again when they are reused."""
        self.step = step
        self.trials.clear()
        running = sum(1 for s in self._open.values() if s == step)
        if running:
            self.trials["running"] = running

    def _stage(self, event: dict[str, Any]) -> None:
        if event["state"] != "ended" and self.state != "running":
            self.state, self.detail = "running", ""
        if event.get("step") is not None and event["step"] != self.step:
            self._enter_step(event["step"])
        name = event["name"]
        if event["state"] == "started":
            self.stage = name
            return
        if self.stage == name:
            self.stage = None
        seconds = event.get("seconds") or 0.0
        self.stage_seconds[name] = self.stage_seconds.get(name, 0.0) + seconds

    def _group_started(self, event: dict[str, Any]) -> None:
        if event["step"] != self.step:
            self._enter_step(event["step"])

    def _trial_started(self, event: dict[str, Any]) -> None:
        self._group_started(event)
        self.trial_steps[event["trial_id"]] = event["step"]
        self._open[event["trial_id"]] = event["step"]
        self.trials["running"] += 1

    def _trial_ended(self, event: dict[str, Any]) -> None:
        trial_id, kind = event["trial_id"], event["kind"]
        self.trial_steps[trial_id] = event["step"]
        if self._open.pop(trial_id, None) == self.step:
            self.trials["running"] -= 1
            if not self.trials["running"]:
                del self.trials["running"]
        if event["step"] == self.step:
            self.trials[kind] += 1
        if trial_id not in self._ended:
            label = "graded" if kind == "graded" else event["cause"]
            self._ended[trial_id] = label
            self.verdicts[label] += 1

    def _group_dropped(self, _event: dict[str, Any]) -> None:
        self.dropped_groups += 1

    def _step_trained(self, event: dict[str, Any]) -> None:
        self.rewards[event["step"]] = event["metrics"].get("reward_mean")
        self.step_ends.append(event["time"])

    def _weights_pushed(self, event: dict[str, Any]) -> None:
        self.weight_version = event["version"]

    def _checkpoint_saved(self, event: dict[str, Any]) -> None:
        self.checkpoint = event["iteration"]

    def _alarm(self, event: dict[str, Any]) -> None:
        self.alarms.append(
            {"kind": event["kind"], "detail": event.get("detail", ""), "time": event["time"]}
        )

    def _run_ended(self, event: dict[str, Any]) -> None:
        self.state = event["state"]
        self.detail = event.get("detail") or ""
        self.stage = None
        self._open.clear()
        self.trials.pop("running", None)


_HANDLERS = {
    "run_started": RunState._run_started,
    "stage": RunState._stage,
    "group_started": RunState._group_started,
    "trial_started": RunState._trial_started,
    "trial_ended": RunState._trial_ended,
    "group_dropped": RunState._group_dropped,
    "step_trained": RunState._step_trained,
    "weights_pushed": RunState._weights_pushed,
    "checkpoint_saved": RunState._checkpoint_saved,
    "alarm": RunState._alarm,
    "run_ended": RunState._run_ended,
}


def fold(events: Iterable[dict[str, Any]]) -> RunState:
    """The state after a journal's events."""
    state = RunState()
    for event in events:
        state.apply(event)
    return state
