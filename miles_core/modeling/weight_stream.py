"""A model's weights under Hugging Face names, gathered to rank 0 a bucket at a time."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import torch
import torch.distributed as dist

from miles_core.modeling import parallel
from miles_core.modeling.families import weights
from miles_core.modeling.gpt import PolicyModel
from miles_core.modeling.hf_config import ModelSpec
from miles_core.modeling.hf_weights import cutting_group, own_tensors
from miles_core.modeling.mapping import Weight

NamedTensor = tuple[str, torch.Tensor]

_ALIGNMENT = 64


@dataclass(frozen=True)
class Entry:
    """One Hugging Face tensor of a bucket, at byte `start` of the bucket."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int

    @property
    def size(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class _Source:
    """Shape and type of a shard of a weight, and the ranks that hold the shards, in order."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class _Planned:
    weight: Weight
    source: _Source
    dtype: torch.dtype
    entries: tuple[Entry, ...]


class WeightStream:
    """A plan of buckets of at most `bucket_size` bytes, and the way to fill them.

    Every rank must make it, with equal arguments, and then call `collect` for the same buckets in
    the same order. `buckets` lists the tensors of each, the same on all ranks. A weight whose
    tensors are larger than `bucket_size` has a bucket of its own.
    `dtype` converts parameters (never the routers' float32 biases); default: as they are.
    `only` leaves out all weights but these, by their names in the whole model. Adapters are merged
    into their weights.

    Rank 0 holds one bucket and the weight that is just being put together; the other ranks send
    their shards to it one at a time, and hold no more than one of them.
    """

    def __init__(
        self,
        model: PolicyModel,
        spec: ModelSpec,
        bucket_size: int,
        dtype: torch.dtype | None = None,
        only: Collection[str] | None = None,
    ) -> None:
        self._own = own_tensors(model)
        self._lora = model.lora
        self._rank = dist.get_rank()
        sources = _sources(spec, self._own)
        self._buckets: list[list[_Planned]] = [[]]
        end = 0
        for weight in weights(spec):
            if only is not None and weight.ours not in only:
                continue
            source = sources[weight.ours]
            kind = source.dtype if weight.ours.endswith("expert_bias") else dtype or source.dtype
            size = _placed(weight, source, kind, 0)[1]
            if self._buckets[-1] and end + size > bucket_size:
                self._buckets.append([])
                end = 0
            entries, end = _placed(weight, source, kind, end)
            self._buckets[-1].append(_Planned(weight, source, kind, tuple(entries)))
        if not self._buckets[0]:
            self._buckets = []
        self.buckets = [
            [entry for planned in bucket for entry in planned.entries] for bucket in self._buckets
        ]

    @property
    def largest(self) -> int:
        """Bytes that hold any of the buckets."""
        return max((end_of(bucket) for bucket in self.buckets), default=0)

    @torch.no_grad()
    def collect(self, number: int, into: torch.Tensor | None) -> list[NamedTensor]:
        """Fill bytes `into` (rank 0: uint8 [largest or more], on any device) with a bucket.

        Returns views of it by name on rank 0, nothing on the others. Collective.
        """
        out: list[NamedTensor] = []
        for planned in self._buckets[number]:
            parts = self._whole(planned)
            if into is None:
                continue
            for entry, part in zip(planned.entries, parts, strict=True):
                place = into[entry.start : entry.start + entry.size]
                view = place.view(entry.dtype).view(entry.shape)
                view.copy_(part)
                out.append((entry.name, view))
        return out

    def _whole(self, planned: _Planned) -> list[torch.Tensor]:
        """The Hugging Face tensors of a weight on rank 0."""
        weight, source = planned.weight, planned.source
        if self._rank != 0:
            if self._rank in source.ranks:
                dist.send(self._shard(planned), dst=0)
            return []
        shards = []
        for rank in source.ranks:
            if rank == 0:
                shards.append(self._shard(planned))
                continue
            shard = torch.empty(source.shape, dtype=planned.dtype, device=parallel.device())
            dist.recv(shard, src=rank)
            shards.append(shard)
        return weight.cut.whole(shards)

    def _shard(self, planned: _Planned) -> torch.Tensor:
        value = self._own[planned.weight.ours].detach()
        if self._lora is not None:
            value = self._lora.merged(planned.weight.ours, value)
        return value.to(planned.dtype).contiguous()


def end_of(bucket: list[Entry]) -> int:
    """Bytes up to the end of the last tensor."""
    return bucket[-1].start + bucket[-1].size


def _placed(
    weight: Weight, source: _Source, dtype: torch.dtype, start: int
) -> tuple[list[Entry], int]:
    """The tensors of a weight from byte `start` on, and where the last one ends."""
    meta = torch.empty(source.shape, dtype=dtype, device="meta")
    entries: list[Entry] = []
    for name, part in zip(weight.theirs, weight.cut.whole([meta] * len(source.ranks)), strict=True):
        start = -(-start // _ALIGNMENT) * _ALIGNMENT
        entries.append(Entry(name, tuple(part.shape), dtype, start))
        start += entries[-1].size
    return entries, start


def _sources(spec: ModelSpec, own: dict[str, torch.Tensor]) -> dict[str, _Source]:
    """Where each weight comes from: the group of the first rank that holds it. Collective."""
    mine: dict[str, _Source] = {}
    for weight in weights(spec):
        tensor = own.get(weight.ours)
        if tensor is not None:
            ranks = tuple(dist.get_process_group_ranks(cutting_group(weight)))
            mine[weight.ours] = _Source(tuple(tensor.shape), tensor.dtype, ranks)
    everywhere: list[dict[str, _Source]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, mine)
    sources: dict[str, _Source] = {}
    for held in everywhere:
        for name, source in held.items():
            sources.setdefault(name, source)
    return sources
