"""Prefect as a mirror: progress artifacts and the poll for a cancel, from a thread of its own.

Nothing here may fail or delay the run. When the server is away the thread waits for it alone.
"""

from __future__ import annotations

import contextvars
import logging
import threading
import time
from uuid import UUID

from miles_core.runs.directory import RunDir
from miles_core.runs.fold import fold
from miles_core.runs.journal import read

log = logging.getLogger(__name__)

POLL_S = 3.0
ARTIFACT_S = 10.0


class Mirror:
    """Follows one flow run while a `with` block works; `cancelled()` never blocks."""

    def __init__(self, run: RunDir, flow_run_id: str) -> None:
        self._run = run
        self._flow_run_id = UUID(flow_run_id)
        self._reason: str | None = None
        self._stop = threading.Event()
        self._artifact: UUID | None = None
        self._shown = -1.0
        self._shown_at = 0.0
        self._away = False
        context = contextvars.copy_context()  # keeps artifacts linked to the flow run
        self._thread = threading.Thread(
            target=lambda: context.run(self._work), name="prefect-mirror", daemon=True
        )

    def __enter__(self) -> Mirror:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=POLL_S)

    def cancelled(self) -> str | None:
        """Why the run is to be cancelled, once Prefect has said so."""
        return self._reason

    def _work(self) -> None:
        while not self._stop.wait(POLL_S):
            try:
                self._poll()
                if time.monotonic() - self._shown_at > ARTIFACT_S:
                    self._show()
                self._away = False
            except Exception as error:  # whatever a client of an absent server raises
                if not self._away:
                    log.warning("Prefect's server does not answer; the run goes on: %r", error)
                self._away = True

    def _poll(self) -> None:
        from prefect import get_client

        with get_client(sync_client=True) as client:
            state = client.read_flow_run(self._flow_run_id).state
        if state is not None and (state.is_cancelling() or state.is_cancelled()):
            self._reason = "the Prefect flow run was cancelled"

    def _show(self) -> None:
        from prefect.artifacts import create_progress_artifact, update_progress_artifact

        state = fold(read(self._run.journal))
        if not state.steps_total:
            return
        share = 100.0 * state.steps_done / state.steps_total
        rewards = [r for r in state.reward_mean if r is not None]
        told = f"step {state.steps_done} of {state.steps_total}"
        if rewards:
            told += f", mean reward {rewards[-1]:.3f}"
        if self._artifact is None:
            made = create_progress_artifact(
                progress=share, key="training-progress", description=told, _sync=True
            )  # type: ignore[call-arg]
            self._artifact = made if isinstance(made, UUID) else None
        elif share != self._shown:
            update_progress_artifact(
                artifact_id=self._artifact, progress=share, description=told, _sync=True
            )  # type: ignore[call-arg]
        self._shown, self._shown_at = share, time.monotonic()
