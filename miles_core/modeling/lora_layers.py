"""Low-rank adapters (LoRA, arXiv 2106.09685) on megatron's parallel linear layers.

`y = W x` becomes `y = W x + alpha / r * B A x`, with A [r, in] and B [out, r] for each Hugging Face
projection, several of which megatron may hold in one layer. W does not change.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.utils import (
    make_sharded_tensor_for_checkpoint,
    make_tp_sharded_tensor_for_checkpoint,
)

from miles_core.config.lora import LoraSettings
from miles_core.modeling import parallel

PREFIX = "base_model.model."  # of PEFT's names


@dataclass(frozen=True)
class Part:
    """A projection in a megatron layer: its Hugging Face name, or None when it has no adapter, and
    the rows of this rank's weight that are its."""

    module: str | None
    rows: int


@dataclass(frozen=True)
class AdapterTensor:
    """A or B of one projection: `name` is PEFT's, `value` this rank's part of it, which tensor
    parallelism cuts along dimension `cut`, or not at all."""

    name: str
    value: torch.nn.Parameter
    cut: int | None

    def sharded(self) -> ShardedTensor:
        """For a checkpoint, under its name."""
        if self.cut is None:
            return make_sharded_tensor_for_checkpoint(self.value, self.name)
        return make_tp_sharded_tensor_for_checkpoint(self.value, self.name, self.cut)


def delta_weight(a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """What an adapter adds to the weight of its projection, float32 [out, in]."""
    return scale * (b.float() @ a.float())


def merged_weight(weight: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """The weight with a float32 delta, in the weight's dtype."""
    return (weight.float() + delta).to(weight.dtype)


def _initial_a(name: str, rank: int, width: int, seed: int) -> torch.Tensor:
    """A [rank, width] as PEFT draws it (Kaiming-uniform, a = sqrt 5), float32. It follows from seed
    and name, so that every layout of ranks starts alike."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    bound = 1 / math.sqrt(width)
    return torch.empty(rank, width).uniform_(-bound, bound, generator=generator)


class Adapter(torch.nn.Module):
    """The adapters of one megatron layer; rows of its output lie by key-value head (`groups` of
    them on this rank) for query, key and value, one part after the other with one group.

    A layer cut by columns has A whole and B cut along its rows; one cut by rows has A cut along its
    columns and B whole. Products of rank r are what tensor-parallel ranks exchange.
    """

    def __init__(
        self, base: torch.nn.Module, parts: Sequence[Part], groups: int, settings: LoraSettings
    ) -> None:
        super().__init__()
        weight: torch.Tensor = base.weight  # type: ignore[assignment]
        self._parts, self._groups, self._scale = parts, groups, settings.scale
        self._by_rows = isinstance(base, RowParallelLinear)
        self._sequence = bool(base.sequence_parallel)
        self._group = parallel.tp_group()
        self.lora_A = torch.nn.ParameterDict()
        self.lora_B = torch.nn.ParameterDict()
        for part in self._own_parts():
            assert part.module is not None
            name, rank = part.module.rpartition(".")[2], settings.rank
            width = weight.shape[1] * (self._group.size() if self._by_rows else 1)
            a = _initial_a(part.module, rank, width, settings.seed)
            if self._by_rows:
                a = a.chunk(self._group.size(), dim=1)[self._group.rank()]
            self.lora_A[name] = self._parameter(a.to(weight), 1 if self._by_rows else None)
            self.lora_B[name] = self._parameter(
                weight.new_zeros(part.rows, rank), None if self._by_rows else 0
            )

    def _parameter(self, value: torch.Tensor, cut: int | None) -> torch.nn.Parameter:
        """With the marks by which megatron counts and reduces gradients."""
        parameter = torch.nn.Parameter(value.contiguous())
        if cut is not None:
            set_tensor_model_parallel_attributes(parameter, True, cut, 1)
        elif self._sequence:  # each rank has the gradient of its part of the sequence
            parameter.sequence_parallel = True  # type: ignore[attr-defined]
        return parameter

    def _own_parts(self) -> list[Part]:
        return [part for part in self._parts if part.module is not None]

    def tensors(self) -> Iterator[AdapterTensor]:
        """A and B of each projection."""
        for part in self._own_parts():
            assert part.module is not None
            name = part.module.rpartition(".")[2]
            cut = 1 if self._by_rows else None
            yield AdapterTensor(f"{PREFIX}{part.module}.lora_A.weight", self.lora_A[name], cut)
            cut = None if self._by_rows else 0
            yield AdapterTensor(f"{PREFIX}{part.module}.lora_B.weight", self.lora_B[name], cut)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What is added to the layer's output, from its input."""
        low = self._exchanged(F.linear(x, torch.cat(list(self.lora_A.values())))) * self._scale
        lows = iter(low.chunk(len(self.lora_A), dim=-1))
        outs = iter(self.lora_B.values())
        return self._joined(
            [
                low.new_zeros(*low.shape[:-1], part.rows)
                if part.module is None
                else F.linear(next(lows), next(outs))
                for part in self._parts
            ]
        )

    def _exchanged(self, low: torch.Tensor) -> torch.Tensor:
        """A x as B needs it; backward sums what the ranks' parts of B give."""
        if self._by_rows:
            if self._sequence:
                return tensor_parallel.reduce_scatter_to_sequence_parallel_region(low)
            return tensor_parallel.reduce_from_tensor_model_parallel_region(low)
        if self._sequence:
            return tensor_parallel.gather_from_sequence_parallel_region(low)
        return tensor_parallel.copy_to_tensor_model_parallel_region(low)

    def _joined(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """Parts [..., rows of it] to [..., all rows] in the order of the layer's output."""
        if len(parts) == 1:
            return parts[0]
        by_group = [part.unflatten(-1, (self._groups, -1)) for part in parts]
        return torch.cat(by_group, dim=-1).flatten(-2)

    @torch.no_grad()
    def delta(self) -> torch.Tensor:
        """What is added to this rank's weight, float32 of its shape."""
        width = next(iter(self.lora_A.values())).shape[1]
        parts = []
        for part in self._parts:
            if part.module is None:
                device = next(self.parameters()).device
                parts.append(torch.zeros(part.rows, width, device=device))
                continue
            name = part.module.rpartition(".")[2]
            parts.append(delta_weight(self.lora_A[name], self.lora_B[name], self._scale))
        return self._joined([part.T for part in parts]).T.contiguous()


def hook(adapter: Adapter, enabled: Any) -> Any:
    """A forward hook that adds the adapter's output while `enabled()`."""

    def add(_: Any, args: tuple[Any, ...], output: tuple[torch.Tensor, Any]) -> Any:
        if not enabled():
            return None
        return output[0] + adapter(args[0]), *output[1:]

    return add
