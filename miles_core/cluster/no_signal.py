"""Raises an alarm when rewards have shown no spread for many steps."""

from __future__ import annotations

from miles_core.runs.journal import Journal


class NoSignal:
    """Counts steps in a row in which every group's rewards were equal; with `whole_step`, for
    estimators that do not compare within groups, those in which all rewards were."""

    def __init__(self, limit: int, journal: Journal, whole_step: bool = False):
        self._whole_step = whole_step
        self._limit = limit
        self._journal = journal
        self._steps = 0

    def record(self, step: int, rewards: list[list[float]]) -> None:
        """Take in the rewards of a step's groups; alarms once each time the limit is reached."""
        flat = [reward for group in rewards for reward in group]
        if any(len(set(group)) > 1 for group in ([flat] if self._whole_step else rewards)):
            self._steps = 0
            return
        self._steps += 1
        if self._steps % self._limit == 0:
            what = "step" if self._whole_step else "group"
            detail = (
                f"no {what} has shown a spread of rewards for {self._steps} steps (step {step}: "
                f"mean {sum(flat) / len(flat):.3g}); nothing is learned from such steps"
            )
            self._journal.append("alarm", kind="no_signal", detail=detail)
