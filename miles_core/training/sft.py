"""Supervised training of a Hugging Face model in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from miles_core.training.config import TrainerConfig
from miles_core.training.worker import TrainerWorker

OnStep = Callable[[int, float, TrainerWorker], bool]


@dataclass
class SftResult:
    """Losses of the steps that were made, and whether `on_step` ended the training."""

    losses: list[float]
    stopped: bool


def run_sft(
    hf_dir: str,
    out_hf_dir: str,
    batches: Iterable[list[dict[str, Any]]],
    *,
    lr: float,
    steps: int,
    on_step: OnStep | None = None,
    warmup_steps: int = 50,
    weight_decay: float = 0.0,
    max_tokens: int = 16384,
    threads: int = 1,
    seed: int = 0,
) -> SftResult:
    """Train `hf_dir` on up to `steps` batches and write the result to `out_hf_dir`.

    A batch is a list of {"tokens": ints [T], "loss_mask": 0|1 [T]}. After each step
    `on_step(step, loss, worker)` is called, with the steps counted from 1; a true answer ends the
    training. It may call `worker.export_hf(dir)` or `worker.log_probs(tokens)` to evaluate.
    """
    config = TrainerConfig(
        seed=seed,
        lr=lr,
        lr_warmup_steps=warmup_steps,
        weight_decay=weight_decay,
        kl_loss_coef=0.0,
        max_tokens_per_gpu=max_tokens,
        threads=threads,
    )
    worker = TrainerWorker(config)
    try:
        worker.init_from_hf(hf_dir)
        result = _train(worker, islice(batches, steps), on_step)
        worker.export_hf(out_hf_dir)
        return result
    finally:
        worker.close()


def _train(
    worker: TrainerWorker, batches: Iterator[list[dict[str, Any]]], on_step: OnStep | None
) -> SftResult:
    losses: list[float] = []
    for step, batch in enumerate(batches, start=1):
        losses.extend(worker.sft([batch])["losses"])
        if on_step is not None and on_step(step, losses[-1], worker):
            return SftResult(losses, stopped=True)
    return SftResult(losses, stopped=False)
