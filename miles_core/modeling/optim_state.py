"""The optimizer's state for a checkpoint, without copies where one rank holds all of it."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

KEYS = ("param", "exp_avg", "exp_avg_sq")


class _Flat:
    """Stands for the flat tensor of a buffer; gives the state of the parameter at a place in it."""

    def __init__(self, states: dict[int, torch.Tensor] | None) -> None:
        self._states = states

    def __getitem__(self, place: slice) -> torch.Tensor:
        if self._states is None:
            return torch.empty(place.stop - place.start, dtype=torch.float32)
        return self._states[place.start].detach().flatten()


def states_in_place(
    self: DistributedOptimizer,
    use_gloo_comm: bool = True,
    empty_data: bool = False,
    return_on_all_ranks: bool = False,
) -> dict[Any, Any] | None:
    """megatron's method copies the whole state of a data-parallel group several times over; a
    group of one needs no copy, and to load it only memory for each tensor's own values."""
    if self.data_parallel_group.size() > 1:
        gathered: dict[Any, Any] | None = _megatron_states(
            self, use_gloo_comm, empty_data, return_on_all_ranks
        )
        return gathered
    state: dict[Any, Any] = {"buckets_coalesced": True}
    for index, ranges in enumerate(self.gbuf_ranges):
        ((dtype, buckets),) = ranges.items()
        starts = {p: place[0] for p, place in self.buffers[index].param_index_map.items()}
        held: dict[str, dict[int, torch.Tensor]] = {key: {} for key in KEYS}
        for bucket in buckets if not empty_data else []:
            for param in bucket["param_map"]:
                tensors = self._get_main_param_and_optimizer_states(param)
                for key in KEYS:
                    held[key][starts[param]] = tensors[key]
        state[index] = {dtype: {k: _Flat(None if empty_data else held[k]) for k in KEYS}}
    return state


_megatron_states = DistributedOptimizer.get_parameter_state_dp_zero
