"""The part of the optimizer's state that this rank owns, as regions of the stored tensors.

Each data-parallel rank stores the ranges of the parameters that its optimizer updates, and reads
the ranges that it updates from whatever ranges were stored: nothing is gathered, and any layout
of ranks loads what another one saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from miles_core.modeling.regions import Region, is_writer, regions, tensors

KEYS = ("param", "exp_avg", "exp_avg_sq")
PREFIX = "optimizer.state."


def own_ranges(parts: list[DistributedOptimizer]) -> dict[torch.nn.Parameter, slice]:
    """For each parameter of which this rank updates something, which of its values."""
    ranges = {}
    for part in parts:
        for param in part.model_param_gbuf_map:
            own = part._get_model_param_range_map(param)["param"]
            ranges[param] = slice(own.start, own.end)
    return ranges


def state_regions(
    parts: list[DistributedOptimizer], model_state: Mapping[str, Any], *, saving: bool
) -> Iterator[Region]:
    """Float32 parameters and moments of this rank's ranges; `saving`: only those that this rank
    stores, where others (of its tensor-parallel group) hold the same."""
    described = {value.data: value for value in tensors(model_state)}
    for part in parts:
        for param in part.model_param_gbuf_map:
            value = described[param]
            if saving and not is_writer(value, of_ranges=True):
                continue
            start = part._get_model_param_range_map(param)["param"].start
            state = part._get_main_param_and_optimizer_states(param)
            for key in KEYS:
                yield from regions(value, f"{PREFIX}{key}.", state[key], start)
