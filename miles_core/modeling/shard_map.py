"""Where each parameter of a whole model lies in a sharded directory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

from miles_core.modeling import parallel
from miles_core.modeling.gpt import PolicyModel
from miles_core.modeling.hf_config import ModelSpec
from miles_core.modeling.model_config import transformer_config
from miles_core.modeling.regions import Region, sharded_tensors


@dataclass(frozen=True)
class Piece:
    """A region of the stored tensor `key`, and the strided part of the parameter that fills it.

    `sizes` has the region's extent in the stored tensor, whose leading dimensions may count layers.
    """

    key: str
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    sizes: tuple[int, ...]
    part: tuple[int, ...]
    stride: tuple[int, ...]
    start: int

    def region(self, parameter: torch.Tensor) -> Region:
        """The region with its values in a contiguous parameter, whose memory it shares."""
        view = torch.as_strided(parameter, self.part, self.stride, self.start)
        return Region(self.key, self.whole, self.offset, view.view(self.sizes))


@dataclass(frozen=True)
class ShardMap:
    """Pieces and shape of each parameter by its name in the whole model, and the empty objects
    that megatron expects beside them."""

    pieces: dict[str, list[Piece]]
    shapes: dict[str, tuple[int, ...]]
    objects: list[str]


def _piece(sharded: ShardedTensor) -> Piece:
    assert sharded.data is not None
    return Piece(
        key=sharded.key,
        whole=tuple(sharded.global_shape),
        offset=tuple(sharded.global_offset),
        sizes=(1,) * sharded.prepend_axis_num + tuple(sharded.local_shape),
        part=tuple(sharded.data.shape),
        stride=tuple(sharded.data.stride()),
        start=int(sharded.data.storage_offset()),
    )


def shard_map(spec: ModelSpec) -> ShardMap:
    """The map of a model, without memory for its weights. Joins a process group of its own."""
    parallel.start(0, 1, "127.0.0.1", 0, 1, seed=0)
    try:
        with torch.device("meta"):
            model = PolicyModel(spec, transformer_config(spec, 1, torch.float32))
        shapes = {name: tuple(tensor.shape) for name, tensor in model.stored_tensors()}
        pieces: dict[str, list[Piece]] = {}
        objects = []
        for name, value in model.sharded_state_dict().items():
            if isinstance(value, ShardedObject):
                objects.append(value.unique_key)
            elif name in shapes:
                pieces[name] = [_piece(sharded) for sharded in sharded_tensors(value)]
    finally:
        parallel.stop()
    missing = shapes.keys() - pieces.keys()
    if missing:
        raise ValueError(f"nothing says how {sorted(missing)} are stored")
    return ShardMap(pieces, shapes, objects)
