"""Which regions of the stored tensors a rank holds: of parameters, and of the flat ranges of them
that a data-parallel rank's optimizer owns."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import (
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Region:
    """A rectangular region of the stored tensor `key` of shape `whole`, and its values here.

    `values` has the region's extent, as many dimensions as `whole`; writing into it is writing
    into the parameter.
    """

    key: str
    whole: Shape
    offset: Shape
    values: torch.Tensor


def boxes(shape: Shape, start: int, stop: int) -> Iterator[tuple[Shape, Shape]]:
    """Offset and extent of the rectangles that make up the values `start` to `stop` of a tensor
    in row-major order, in that order: at most 2 n - 1 of n dimensions."""
    if start >= stop:
        return
    if len(shape) < 2:
        yield ((start,), (stop - start,)) if shape else ((), ())
        return
    row = math.prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    if first == last and stop - start < row:
        for offset, extent in boxes(shape[1:], start - first * row, stop - first * row):
            yield (first, *offset), (1, *extent)
        return
    head = -(-start // row)
    tail = stop // row
    if start < head * row:
        yield from boxes(shape, start, head * row)
    if head < tail:
        zeros = (0,) * (len(shape) - 1)
        yield (head, *zeros), (tail - head, *shape[1:])
    if tail * row < stop:
        yield from boxes(shape, tail * row, stop)


def tensors(described: Mapping[str, Any]) -> Iterator[ShardedTensor | ShardedTensorFactory]:
    """The parameters in a `sharded_state_dict`."""
    for value in described.values():
        if isinstance(value, ShardedTensor | ShardedTensorFactory):
            yield value


def sharded_tensors(value: ShardedTensor | ShardedTensorFactory) -> Iterator[ShardedTensor]:
    """What a parameter is stored as: one tensor, or several that are views of it."""
    if isinstance(value, ShardedTensor):
        yield value
        return
    with torch.no_grad():
        built = value.build()
    parts = built.values() if isinstance(built, dict) else built
    for part in parts:
        yield from sharded_tensors(part)


def _place(part: torch.Tensor, parameter: torch.Tensor) -> int:
    """Where in a parameter a part of it begins, which has to be a contiguous view of it."""
    start = (part.data_ptr() - parameter.data_ptr()) // parameter.itemsize
    shared = part.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()
    within = shared and 0 <= start <= parameter.numel() - part.numel()
    if not within or not part.is_contiguous() or not parameter.is_contiguous():
        raise ValueError("a stored tensor is not a contiguous part of its parameter")
    return int(start)


def regions(
    value: ShardedTensor | ShardedTensorFactory,
    prefix: str = "",
    flat: torch.Tensor | None = None,
    start: int = 0,
) -> Iterator[Region]:
    """The regions of a parameter as megatron describes it (`sharded_state_dict`).

    With `flat` [n], those of its values `start` to `start + n` in row-major order, which `flat`
    holds, of the stored tensors whose keys begin with `prefix`.
    """
    parameter = value.data.detach()
    if flat is None:
        flat = parameter.view(-1)
    flat = flat.detach()
    for sharded in sharded_tensors(value):
        assert sharded.data is not None
        place, count = _place(sharded.data, parameter), sharded.data.numel()
        low, high = max(start, place), min(start + len(flat), place + count)
        leading = (1,) * sharded.prepend_axis_num
        shape = tuple(sharded.local_shape)
        for offset, extent in boxes(shape, low - place, high - place):
            size = math.prod(extent)
            values = flat[low - start : low - start + size].view(*leading, *extent)
            low += size
            inner = (0,) * len(leading) + offset
            whole_offset = tuple(a + b for a, b in zip(sharded.global_offset, inner, strict=True))
            yield Region(prefix + sharded.key, tuple(sharded.global_shape), whole_offset, values)


def is_writer(value: ShardedTensor | ShardedTensorFactory, *, of_ranges: bool) -> bool:
    """Whether this rank stores the parameter and not another that holds the same; `of_ranges`:
    among the data-parallel ranks each stores a range of its own."""
    replica: Any = value.replica_id
    if of_ranges and isinstance(replica, tuple):
        replica = (*replica[:-1], 0)
    return bool(is_main_replica(replica))
