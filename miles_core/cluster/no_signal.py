"""Raises an alarm when rewards have shown no spread within any group for many steps."""

from __future__ import annotations

from miles_core.runs.journal import Journal


class NoSignal:
    """Counts steps in a row in which every group's rewards were equal."""

    def __init__(self, limit: int, journal: Journal):
        self._limit = limit
        self._journal = journal
        self._steps = 0

    def record(self, step: int, rewards: list[list[float]]) -> None:
        """Take in the rewards of a step's groups; alarms once each time the limit is reached."""
        if any(len(set(group)) > 1 for group in rewards):
            self._steps = 0
            return
        self._steps += 1
        if self._steps % self._limit == 0:
            flat = [reward for group in rewards for reward in group]
            detail = (
                f"no group has shown a spread of rewards for {self._steps} steps (step {step}: "
                f"mean {sum(flat) / len(flat):.3g}); nothing is learned from such steps"
            )
            self._journal.append("alarm", kind="no_signal", detail=detail)
