"""Tells an outage of the world from bad luck, and holds new trials back while it lasts."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable

from miles_core.verdicts import Verdict


class OutageError(RuntimeError):
    """Too many trials ended without a verdict, and the configuration says to fail."""


class OutageGate:
    """A window over the latest verdicts; closed for a while when too many of them say nothing.

    The gate opens again after `wait_s` with an empty window: the next trials are the probe.
    `outages` counts how often it has closed.
    """

    def __init__(
        self,
        window: int,
        max_share: float,
        fail: bool,
        wait_s: float,
        on_alarm: Callable[[str, str], None],
    ):
        self._recent: deque[str | None] = deque(maxlen=window)
        self._max_share = max_share
        self._fail = fail
        self._wait_s = wait_s
        self._on_alarm = on_alarm
        self._closed_until = 0.0
        self.outages = 0

    def record(self, verdict: Verdict) -> None:
        """Take in a verdict; raises OutageError when the limit is passed and `fail` is set."""
        self._recent.append(None if verdict.trainable else str(verdict.cause))
        causes = [cause for cause in self._recent if cause is not None]
        full = len(self._recent) == self._recent.maxlen
        if not full or len(causes) <= self._max_share * len(self._recent):
            return
        counts = ", ".join(f"{cause} {n}" for cause, n in Counter(causes).most_common())
        detail = f"{len(causes)} of the last {len(self._recent)} trials gave no verdict: {counts}"
        self._recent.clear()
        if self._fail:
            raise OutageError(detail)
        self.outages += 1
        self._closed_until = time.monotonic() + self._wait_s
        self._on_alarm("outage", f"{detail}; new trials wait {self._wait_s:g} s")

    async def passed(self) -> None:
        """Return once the gate is open."""
        while (left := self._closed_until - time.monotonic()) > 0:  # noqa: ASYNC110
            await asyncio.sleep(left)
