"""One rank that trains in one layout after the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rank_helpers import meet

from miles_core.training import worker as worker_module
from miles_core.training.config import TrainerConfig
from miles_core.training.worker import TrainerWorker

CONFIG = TrainerConfig(
    global_batch_size=4,
    lr=2e-3,
    temperature=0.8,
    kl_loss_coef=0.0,
    entropy_coef=0.001,
    max_tokens_per_gpu=90,
)
STEPS = 5
SAVED = 2


@contextmanager
def on_a_pretended_gpu() -> Iterator[None]:
    """Let workers of this process offload the optimizer, which they refuse on the CPU."""
    patched = SimpleNamespace(ON_CPU=False)
    before, worker_module.modeling = worker_module.modeling, patched
    try:
        yield
    finally:
        worker_module.modeling = before


def train(
    case: dict[str, Any], rollout: str, rank: int = 0, world: int = 1, export: Path | None = None
) -> list[dict[str, Any]]:
    """Metrics of five steps over one rollout, in the case's layout.

    With `save` a checkpoint is written there after two steps; with `load` three steps follow one.
    """
    config = replace(CONFIG, **case["changes"])
    worker = TrainerWorker(config, rank, world, **(meet(rank) if world > 1 else {}))
    metrics = []
    try:
        if "load" in case:
            worker.init(case["load"])
        else:
            worker.init_from_hf(case["hf"])
        for step in range(SAVED if "load" in case else 0, STEPS):
            if step == SAVED and "save" in case:
                worker.save(case["save"])
            metrics.append(worker.train(0, rollout))
        if export is not None:
            worker.export_hf(str(export))
    finally:
        worker.close()
    return metrics


def rank_main(request: dict[str, Any], rank: int, world: int, out: Path) -> dict[str, Any]:
    """Metrics of every case; exports beside `out`."""
    with on_a_pretended_gpu():
        return {
            name: train(case, request["rollout"], rank, world, out.with_name(f"{out.name}-{name}"))
            for name, case in request["cases"].items()
        }
