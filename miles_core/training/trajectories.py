"""Sums over the sampled tokens of a trajectory, whose samples may lie on several ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from miles_core.training.batch import RolloutBatch, TrainSample
from miles_core.training.reduce import sum_over_ranks, sum_vector

TokenValues = Callable[[TrainSample], torch.Tensor]
"""A value [T] for each token of a sample; only those of sampled tokens count."""


def masked(sample: TrainSample, values: TokenValues) -> torch.Tensor:
    """The values of a sample, float64 [T], zero where nothing was sampled."""
    return values(sample).double().masked_fill(~sample.mask, 0.0)


def sample_sums(
    batch: RolloutBatch, own: Iterable[TrainSample], values: TokenValues
) -> dict[tuple[int, int], float]:
    """The sum for each sample of the batch, by (trajectory, index); equal on all ranks.

    `own` are the samples of this rank. Collective over the data-parallel ranks.
    """
    mine = {f"{s.trajectory} {s.index}": masked(s, values).sum().item() for s in own}
    names = {f"{s.trajectory} {s.index}": (s.trajectory, s.index) for s in batch.samples}
    totals = sum_over_ranks(mine, list(names))
    return {key: totals[name] for name, key in names.items()}


def flat_tokens(
    batch: RolloutBatch, own: Iterable[TrainSample], values: TokenValues
) -> torch.Tensor:
    """The values of all N sampled tokens of the batch, float64 [N] on the CPU, trajectory by
    trajectory and in each by the order of its samples; equal on all ranks.

    `own` are the samples of this rank. Collective over the data-parallel ranks.
    """
    mine = {(s.trajectory, s.index) for s in own if s.mask.any()}
    parts = [
        masked(s, values)[s.mask]
        if (s.trajectory, s.index) in mine
        else torch.zeros(int(s.mask.sum()), dtype=torch.float64)
        for s in batch.samples
    ]
    return sum_vector(torch.cat(parts))


def trajectory_sums(
    batch: RolloutBatch, own: Iterable[TrainSample], values: TokenValues
) -> list[float]:
    """The sum for each trajectory of the batch; equal on all ranks. Collective."""
    sums = [0.0] * len(batch.rewards)
    for (trajectory, _), value in sample_sums(batch, own, values).items():
        sums[trajectory] += value
    return sums
