"""What must never pass in silence: ranks that disagree, weights that are not finite, wrong input.

All checks but `check_tokens` are collective and raise on every rank when they do on one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from miles_core.modeling import parallel
from miles_core.modeling.replicas import Replicas, bit_sum, spread
from miles_core.training.batch import RolloutBatch, TrainSample
from miles_core.training.errors import CorruptionError

MAX_NAMES = 5
# Ranks that compute a metric each by itself may differ in its last digits.
METRIC_TOLERANCE = 1e-3


def some(names: Sequence[str]) -> str:
    """How many, and the first few."""
    more = ", ..." if len(names) > MAX_NAMES else ""
    return f"{len(names)} ({', '.join(names[:MAX_NAMES])}{more})"


def gather_names(own: list[str]) -> list[str]:
    """The names that any rank has, each once, in the order of the first rank that has them.
    Collective."""
    everywhere: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, own)
    return list(dict.fromkeys(name for names in everywhere for name in names))


def true_anywhere(flags: Sequence[bool]) -> list[bool]:
    """Each flag on any rank. Collective."""
    vector = torch.tensor([float(flag) for flag in flags], device=parallel.device())
    dist.all_reduce(vector, op=dist.ReduceOp.MAX)
    return [value > 0 for value in vector.tolist()]


def check_weights(replicas: Replicas) -> None:
    """Raise CorruptionError for weights that are not finite, or that differ between ranks that
    hold the same ones."""
    bad, apart = replicas.non_finite(), replicas.diverged()
    found = true_anywhere([bool(bad), bool(apart)])
    if found[0]:
        raise CorruptionError(f"weights are not finite: {some(gather_names(bad))} parameters")
    if found[1]:
        raise CorruptionError(
            f"ranks that should hold the same weights differ in {some(gather_names(apart))} "
            "parameters"
        )


def check_metrics(metrics: dict[str, Any]) -> None:
    """Raise CorruptionError when the ranks' metrics of a step differ."""
    metrics = {name: value for name, value in metrics.items() if isinstance(value, float)}
    values = torch.tensor(list(metrics.values()), dtype=torch.float64, device=parallel.device())
    finite = torch.isfinite(values)
    world = dist.group.WORLD
    assert world is not None
    low, high = spread(torch.where(finite, values, 0.0), world)
    least, most = spread(finite.double(), world)
    scale = torch.maximum(low.abs(), high.abs())
    apart = (high - low > METRIC_TOLERANCE * scale + 1e-6) | (least != most)
    names = [name for name, differs in zip(metrics, apart.tolist(), strict=True) if differs]
    if names:
        raise CorruptionError(f"the ranks computed different metrics: {some(names)}")


def check_same_batch(batch: RolloutBatch, source: str) -> None:
    """Raise CorruptionError unless all ranks read the same rollout."""
    total = torch.zeros((), dtype=torch.int64)
    for number, sample in enumerate(batch.samples, 1):
        values = (sample.tokens, sample.mask.long(), sample.rollout.double())
        total += number * sum(bit_sum(value) for value in values)
    rewards = bit_sum(torch.tensor(batch.rewards, dtype=torch.float64))
    digest = torch.stack([torch.tensor(batch.step), total, rewards]).to(parallel.device())
    world = dist.group.WORLD
    assert world is not None
    low, high = spread(digest, world)
    if not torch.equal(low, high):
        raise CorruptionError(f"the ranks read different contents of {source}")


def check_tokens(samples: Iterable[TrainSample], vocab_size: int) -> None:
    """Raise ValueError, naming the trial, for a token that is not in the vocabulary."""
    for sample in samples:
        low, high = int(sample.tokens.min()), int(sample.tokens.max())
        if low < 0 or high >= vocab_size:
            raise ValueError(
                f"sample {sample.index} of {sample.trial_id} has the token "
                f"{low if low < 0 else high}, but the model's vocabulary is 0 to "
                f"{vocab_size - 1}; is it from another model's tokenizer?"
            )
