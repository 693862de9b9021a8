"""The key/value cache: one pool of token places, from which sequences hold contiguous extents."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from miles_core.engines.shape import ModelShape


@dataclass
class Extent:
    """Places `start .. start + size` of the pool."""

    start: int
    size: int


class KVPool:
    """Keys and values of `capacity` tokens, [layers][kv_heads, capacity, head_dim] each; of a model
    with experts also those that each token went to, int32 [capacity, layers, k], 0 where a layer
    has none.

    The pool is made once and never grows, so the memory of the cache is bounded. Extents are
    handed out first-fit; what is given back joins its free neighbours.
    """

    def __init__(self, shape: ModelShape, capacity: int, dtype: torch.dtype) -> None:
        size = (shape.layers, shape.kv_heads, capacity, shape.head_dim)
        self.keys = torch.empty(size, dtype=dtype)
        self.values = torch.empty(size, dtype=dtype)
        self.layer_keys = list(self.keys.unbind(0))
        self.layer_values = list(self.values.unbind(0))
        self.experts: torch.Tensor | None = None
        if shape.experts is not None:
            self.experts = torch.zeros(
                capacity, shape.layers, shape.experts.chosen, dtype=torch.int32
            )
        self.capacity = capacity
        self.free: list[Extent] = [Extent(0, capacity)]

    @property
    def used(self) -> int:
        """Token places that are held."""
        return self.capacity - sum(extent.size for extent in self.free)

    def allocate(self, size: int) -> Extent | None:
        """An extent of `size` places, or None when no free stretch is long enough."""
        for index, hole in enumerate(self.free):
            if hole.size >= size:
                extent = Extent(hole.start, size)
                hole.start += size
                hole.size -= size
                if not hole.size:
                    del self.free[index]
                return extent
        return None

    def release(self, extent: Extent) -> None:
        """Give an extent back."""
        if extent.size:
            self.free.append(Extent(extent.start, extent.size))
            self.free.sort(key=lambda hole: hole.start)
            merged: list[Extent] = []
            for hole in self.free:
                if merged and merged[-1].start + merged[-1].size == hole.start:
                    merged[-1].size += hole.size
                else:
                    merged.append(hole)
            self.free = merged
            extent.size = 0

    def resize(self, extent: Extent, size: int) -> bool:
        """Change an extent's size where it lies; False when what follows it is not free."""
        if size <= extent.size:
            tail = Extent(extent.start + size, extent.size - size)
            extent.size = size
            self.release(tail)
            return True
        end, more = extent.start + extent.size, size - extent.size
        for index, hole in enumerate(self.free):
            if hole.start == end and hole.size >= more:
                hole.start += more
                hole.size -= more
                if not hole.size:
                    del self.free[index]
                extent.size = size
                return True
        return False

    def copy(self, source: Extent, target: Extent, count: int) -> None:
        """Copy the first `count` places of one extent to another."""
        for pool in (self.keys, self.values):
            pool.narrow(2, target.start, count).copy_(pool.narrow(2, source.start, count))
        if self.experts is not None:
            kept = self.experts.narrow(0, source.start, count)
            self.experts.narrow(0, target.start, count).copy_(kept)
