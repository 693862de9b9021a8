"""Sharded (`torch_dist`) directories: written in this process, readable in any layout of ranks."""

from __future__ import annotations

import os
import queue
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from torch.distributed.checkpoint.filesystem import SerializationFormat, _write_item

from miles_core.modeling.gpt import PolicyModel
from miles_core.modeling.optim import Optimizer
from miles_core.modeling.sharded_files import without_crc32


def _write_file(bucket: Any, transforms: list[Any]) -> list[Any]:
    """Write one file of a rank, durably; the places of its tensors."""
    path, key, (objects, tensors) = bucket
    with open(path, "wb") as stream, without_crc32():
        places = [
            _write_item(
                transforms[0],
                stream,
                data,
                item,
                key,
                serialization_format=SerializationFormat.TORCH_SAVE,
            )
            for item, data in (*objects, *tensors)
        ]
        stream.flush()
        os.fsync(stream.fileno())
    return places


def _write_here(
    transforms: list[Any], use_msc: bool, rank: int, buckets: list[Any], results: queue.Queue
) -> None:
    """Write the files one after the other; megatron forks a process for each."""
    results.put({index: _write_file(bucket, transforms) for index, bucket in enumerate(buckets)})


# Saving here is synchronous, so a queue in this process does instead of a manager process that
# would outlive the save.
filesystem_async._get_write_results_queue = queue.Queue
filesystem_async.FileSystemWriterAsync.write_preloaded_data_multiproc = staticmethod(_write_here)


def is_torch_dist(directory: str | Path) -> bool:
    """Whether the directory holds a sharded checkpoint."""
    return (Path(directory) / "metadata.json").is_file()


def _random_state() -> dict[str, Any]:
    return {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }


def _random_entry(state: dict[str, Any] | None) -> ShardedObject:
    size = dist.get_world_size()
    return ShardedObject("random", state, (size,), (dist.get_rank(),), replica_id=0)


def save(
    directory: str | Path,
    model: PolicyModel,
    optimizer: Optimizer | None = None,
    extra: dict[str, Any] | None = None,
    more: dict[str, Any] | None = None,
) -> None:
    """Write the model and, when given, the optimizer and every rank's random state. Collective.

    Of a model with adapters these alone are written, not what is frozen.
    `extra` holds plain values, equal on all ranks, `more` further entries from `named_state`.
    `directory` must exist and be empty.
    """
    model_state = _trained(model)
    state: dict[str, Any] = {"model": model_state, "extra": extra or {}, **(more or {})}
    if optimizer is not None:
        state["optimizer"] = optimizer.sharded_state(model_state, loading=False)
        state["layout"] = {"steps": optimizer.steps, "ranks": dist.get_world_size()}
        state["random"] = _random_entry(_random_state())
    dist_checkpointing.save(state, str(directory), validate_access_integrity=False)
    dist.barrier()


def named_state(
    name: str, model: PolicyModel, optimizer: Optimizer, extra: dict[str, Any]
) -> dict[str, Any]:
    """A second model with its optimizer, to be saved as the entry `name` of a checkpoint; its
    tensors are stored under `name.` and their usual names. Collective."""
    state = _named(name, model, optimizer, loading=False)
    return {**state, "steps": optimizer.steps, "extra": extra}


def _named(
    name: str, model: PolicyModel, optimizer: Optimizer | None, loading: bool
) -> dict[str, Any]:
    state: dict[str, Any] = {"model": model.sharded_state_dict()}
    if optimizer is not None:
        state["optimizer"] = optimizer.sharded_state(state["model"], loading=loading)
    add_prefix_for_sharding(state, f"{name}.")
    return state


def has(directory: str | Path, name: str) -> bool:
    """Whether a checkpoint holds a second model of that name."""
    return name in dist_checkpointing.load_common_state_dict(str(directory))


def load_named(
    directory: str | Path, name: str, model: PolicyModel, optimizer: Optimizer | None = None
) -> dict[str, Any]:
    """Load what `named_state` saved; its `extra`. Collective."""
    common = dist_checkpointing.load_common_state_dict(str(directory))[name]
    wanted = {name: _named(name, model, optimizer, loading=True)}
    state = dist_checkpointing.load(wanted, str(directory), validate_access_integrity=False)[name]
    model.load_state_dict(state["model"])
    if optimizer is not None:
        optimizer.load_state(state["optimizer"], common["steps"])
    extra: dict[str, Any] = common["extra"]
    return extra


def _trained(model: PolicyModel) -> dict[str, Any]:
    """What a checkpoint holds of a model: its adapters if it has some, else all of it."""
    return model.sharded_state_dict() if model.lora is None else model.lora.sharded_state()


def load_base(directory: str | Path, model: PolicyModel) -> None:
    """Load a converted model; adapters are left as they are. Collective."""
    wanted = {"model": model.sharded_state_dict()}
    state = dist_checkpointing.load(wanted, str(directory), validate_access_integrity=False)
    model.take(state["model"])


def load(
    directory: str | Path,
    model: PolicyModel,
    optimizer: Optimizer | None = None,
    leave_out: str | None = None,
) -> dict[str, Any] | None:
    """Load what `save` wrote: the model, or its adapters; the optimizer and the random state too
    when both sides have one. Collective.

    The parameter called `leave_out` stays as it is. Returns `extra` of a checkpoint that was saved
    with an optimizer, else None. The random state is restored only into the same number of ranks.
    """
    common = dist_checkpointing.load_common_state_dict(str(directory))
    layout = common.get("layout")
    model_state = _trained(model)
    kept = model_state.pop(leave_out, None) if leave_out else None
    wanted: dict[str, Any] = {"model": model_state}
    if optimizer is not None and layout is not None:
        wanted["optimizer"] = optimizer.sharded_state(model_state, loading=True)
        if layout["ranks"] == dist.get_world_size():
            wanted["random"] = _random_entry(None)
    state = dist_checkpointing.load(wanted, str(directory), validate_access_integrity=False)
    if kept is not None:
        state["model"][leave_out] = kept.data
    (model if model.lora is None else model.lora).take(state["model"])
    if optimizer is None:
        return common["extra"] if layout is not None else None
    if layout is None:
        optimizer.weights_were_replaced()
        return None
    optimizer.load_state(state["optimizer"], layout["steps"])
    if "random" in state:
        torch.set_rng_state(state["random"]["torch"])
        np.random.set_state(state["random"]["numpy"])
        random.setstate(state["random"]["python"])
    return common["extra"]
