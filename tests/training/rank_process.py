"""One rank that makes a list of calls."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from rank_helpers import meet
from trainer_helpers import CONFIG

from miles_core.training.worker import TrainerWorker


def rank_main(request: dict[str, Any], rank: int, world: int, out: Path) -> list[Any]:
    """The answers of the calls."""
    config = replace(CONFIG, **request["changes"])
    worker = TrainerWorker(config, rank, world, **meet(rank))
    answers = [getattr(worker, method)(*args) for method, *args in request["calls"]]
    worker.close()
    return answers
