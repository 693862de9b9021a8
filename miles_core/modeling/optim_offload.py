"""The optimizer's state in host memory: Adam's moments and, for bfloat16, the float32 weights.

Between two steps the device holds none of it. A step takes one parameter after the other: its state
is copied to the device, updated there by the same AdamW as always, and copied back, so that
memory is needed for the largest of them. What is computed is the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

MOMENTS = ("exp_avg", "exp_avg_sq")


def _on_host(like: torch.Tensor) -> torch.Tensor:
    """Uninitialised memory of the host that the device can copy from and to by itself."""
    return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=like.is_cuda)


class HostState:
    """Takes the state of one megatron optimizer to the host and its methods over.

    Raises ValueError for another Adam than torch's, whose state is not known here.
    """

    def __init__(self, part: DistributedOptimizer) -> None:
        self._part: Any = part
        self._adam: Any = part.optimizer
        if type(self._adam) is not torch.optim.AdamW:
            raise ValueError(
                f"optimizer_cpu_offload needs torch's AdamW, but megatron took "
                f"{type(self._adam).__module__}; uninstall Transformer Engine and apex, or leave "
                "--optimizer-cpu-offload out"
            )
        self._masters: dict[torch.Tensor, torch.Tensor] = {}
        for group in part.shard_fp32_from_float16_groups:
            for master in group:
                self._masters[master] = _on_host(master)
                self._leave(master)
        for group in self._adam.param_groups:
            for param in group["params"]:
                zeros = {name: _on_host(param).zero_() for name in MOMENTS}
                self._adam.state[param] = {"step": torch.tensor(0.0), **zeros}
        self._step_all = self._adam.step
        self._adam.step = self._step  # type: ignore[method-assign]
        self._part._copy_main_params_to_model_params = self._masters_to_weights
        self._part._copy_model_params_to_main_params = self._weights_to_masters
        self._part._get_main_param_and_optimizer_states = self._states

    def _come(self, param: torch.Tensor) -> None:
        """Give a float32 weight its memory on the device, and its value."""
        if param in self._masters:
            param.untyped_storage().resize_(param.numel() * param.element_size())
            param.data.copy_(self._masters[param], non_blocking=True)

    def _leave(self, param: torch.Tensor) -> None:
        """Take the value of a float32 weight to the host and its memory from the device."""
        if param in self._masters:
            self._masters[param].copy_(param.detach(), non_blocking=True)
            param.untyped_storage().resize_(0)

    @contextmanager
    def _on_device(self, param: torch.Tensor) -> Iterator[None]:
        state = self._adam.state[param]
        host = {name: state[name] for name in MOMENTS}
        self._come(param)
        for name, values in host.items():
            state[name] = torch.empty_like(values, device=param.device, pin_memory=False)
            state[name].copy_(values, non_blocking=True)
        try:
            yield
        finally:
            for name, values in host.items():
                values.copy_(state[name], non_blocking=True)
                state[name] = values
            self._leave(param)

    def _step(self, closure: Any = None) -> None:
        """AdamW's step, parameter by parameter."""
        groups = self._adam.param_groups
        try:
            for group in groups:
                for param in group["params"]:
                    self._adam.param_groups = [{**group, "params": [param]}]
                    with self._on_device(param):
                        self._step_all()
        finally:
            self._adam.param_groups = groups
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the host reads what was copied to it

    def _shards(self) -> Iterator[tuple[torch.Tensor, torch.nn.Parameter, torch.Tensor]]:
        """Host copy of a float32 weight, its parameter, and its place in the buffer of weights."""
        groups = zip(
            self._part.shard_fp32_from_float16_groups, self._part.model_float16_groups, strict=True
        )
        for masters, params in groups:
            for master, param in zip(masters, params, strict=True):
                place = self._part._get_model_param_range_map(param)["gbuf_world_in_bucket"]
                buffer, _, bucket = self._part.model_param_gbuf_map[param]
                weights = self._part.buffers[buffer].buckets[bucket].param_data.view(-1)
                yield self._masters[master], param, weights[place.start : place.end]

    @torch.no_grad()
    def _masters_to_weights(self) -> None:
        for host, _, shard in self._shards():
            shard.copy_(host)

    @torch.no_grad()
    def _weights_to_masters(self, state_dict: Any = None) -> None:
        for host, param, _ in self._shards():
            place = self._part._get_model_param_range_map(param)["param"]
            host.copy_(param.detach().view(-1)[place.start : place.end])

    def _states(self, param: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """The state of a parameter of the model, on the host but for weights that train as they
        are, for checkpoints."""
        group, order = self._part.model_param_group_index_map[param]
        main = self._adam.param_groups[group]["params"][order]
        return {"param": self._masters.get(main, main), **self._adam.state[main]}
