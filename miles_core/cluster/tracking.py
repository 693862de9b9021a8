"""Weights & Biases as a mirror of metrics.jsonl; it may lag or fail, the run goes on."""

from __future__ import annotations

import logging
import queue
import threading
from pathlib import Path
from typing import Any

from miles_core.config.schema import TrackingConfig

log = logging.getLogger(__name__)

FINISH_S = 20.0


class Tracker:
    """Sends metrics from a thread of its own. The run's id is kept over all attempts."""

    def __init__(
        self, config: TrackingConfig, run_id: str, directory: Path, settings: dict[str, Any]
    ):
        self._queue: queue.Queue[tuple[int, dict[str, Any]] | None] = queue.Queue(maxsize=1000)
        self._thread: threading.Thread | None = None
        if config.wandb_mode == "disabled":
            return
        self._thread = threading.Thread(
            target=self._work, args=(config, run_id, directory, settings), daemon=True
        )
        self._thread.start()

    def _work(
        self, config: TrackingConfig, run_id: str, directory: Path, settings: dict[str, Any]
    ) -> None:
        try:
            import wandb

            directory.mkdir(parents=True, exist_ok=True)
            run = wandb.init(
                project=config.wandb_project,
                id=run_id,
                name=run_id,
                resume="allow",
                mode=config.wandb_mode,
                dir=str(directory),
                config=settings,
                settings=wandb.Settings(console="off", silent=True),
            )
            while (item := self._queue.get()) is not None:
                step, metrics = item
                run.log(metrics, step=step)
            run.finish()
        except Exception as error:  # the mirror must not end the run, whatever its library raises
            log.warning("W&B is off for the rest of this attempt: %s", error)

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        """Queue the metrics of a step; dropped when the mirror cannot keep up."""
        if self._thread is None or not self._thread.is_alive():
            return
        try:
            self._queue.put_nowait((step, metrics))
        except queue.Full:
            log.warning("W&B cannot keep up: metrics of step %d are not mirrored", step)

    def finish(self) -> None:
        """Flush, for a bounded time."""
        if self._thread is not None and self._thread.is_alive():
            self._queue.put(None)
            self._thread.join(FINISH_S)
