"""What every task asks: whether the run is to be cancelled."""

from __future__ import annotations

from collections.abc import Callable

from miles_core.cluster.supervise import RunCancelled, stop_reason
from miles_core.runs.directory import RunDir


def canceller(run: RunDir, mirror_says: Callable[[], str | None]) -> Callable[[], None]:
    """A function that raises RunCancelled once `RUN/STOP` exists or Prefect cancels the run."""

    def check() -> None:
        reason = stop_reason(run) or mirror_says()
        if reason:
            raise RunCancelled(reason)

    return check
