"""Sums and maxima of plain numbers over ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from miles_core.modeling import parallel


def sum_over_ranks(values: dict[str, float], names: Sequence[str]) -> dict[str, float]:
    """Sums over the data-parallel ranks of the values called `names` (absent: 0). Collective."""
    vector = torch.tensor([values.get(name, 0.0) for name in names], dtype=torch.float64)
    return dict(zip(names, sum_vector(vector).tolist(), strict=True))


def sum_vector(vector: torch.Tensor) -> torch.Tensor:
    """Sum of a vector over the data-parallel ranks, on the CPU. Collective."""
    vector = vector.to(parallel.device())
    dist.all_reduce(vector, group=parallel.dp_group())
    return vector.cpu()


def max_over_ranks(values: dict[str, float]) -> dict[str, float]:
    """Maxima over all ranks; every rank gives the same names. Collective."""
    vector = torch.tensor(list(values.values()), dtype=torch.float64, device=parallel.device())
    dist.all_reduce(vector, op=dist.ReduceOp.MAX)
    return dict(zip(values, vector.tolist(), strict=True))
