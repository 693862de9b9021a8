"""Whether a trial has a place in time: an estimate of the queue from the trials that ended."""

from __future__ import annotations

import statistics
from collections import deque

REMEMBERED = 50


class QueueFull(Exception):
    """A trial would not end before its caller gives up; `retry_s` is when to ask again."""

    def __init__(self, message: str, retry_s: float) -> None:
        super().__init__(message)
        self.retry_s = retry_s


class QueueEstimate:
    """How long a trial has to wait, given how long the last ones took.

    Trials start in the order of the queue whenever one of `capacity` places is free, so the one
    behind `ahead` others waits for about `ahead / capacity` trials more than the first.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._seconds: deque[float] = deque(maxlen=REMEMBERED)

    def ended(self, seconds: float) -> None:
        """A trial has run for this long."""
        self._seconds.append(seconds)

    def wait_s(self, ahead: int) -> float:
        """Seconds until a trial with `ahead` running or queued before it starts."""
        if ahead < self._capacity or not self._seconds:
            return 0.0
        return statistics.median(self._seconds) * (ahead // self._capacity)

    def check(self, ahead: int, deadline_s: float | None) -> None:
        """Raise QueueFull when a trial would be queued and end after `deadline_s` seconds."""
        wait = self.wait_s(ahead)
        if deadline_s is None or wait == 0.0:
            return
        each = statistics.median(self._seconds)
        if wait + each > deadline_s:
            raise QueueFull(
                f"{ahead} trials are before it, which takes about {wait:.0f} s and {each:.0f} s "
                f"for itself; the caller gives up after {deadline_s:.0f} s",
                retry_s=min(wait, each),
            )
