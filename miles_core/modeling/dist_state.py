"""Sharded (`torch_dist`) directories: written by every rank, readable in any layout of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedObject, is_main_replica

from miles_core.modeling.gpt import PolicyModel
from miles_core.modeling.optim import Optimizer
from miles_core.modeling.random_state import SAFE, random_state, set_random_state
from miles_core.modeling.regions import Region, is_writer, regions, tensors
from miles_core.modeling.shard_reader import ShardReader
from miles_core.modeling.sharded_files import (
    FORMAT_FILE,
    Item,
    ShardFile,
    write_index,
)

FILES_PER_RANK = 2  # written at the same time


def is_torch_dist(directory: str | Path) -> bool:
    """Whether the directory holds a sharded checkpoint."""
    return (Path(directory) / FORMAT_FILE).is_file()


@dataclass(frozen=True)
class State:
    """What this rank stores: regions of tensors, objects by key, and plain values that are equal
    on all ranks. The regions share the memory of what they were collected from."""

    regions: list[Region]
    objects: dict[str, Any]
    common: dict[str, Any]

    @property
    def bytes(self) -> int:
        """Bytes of the values; memory that two regions share counts once."""
        return sum(size for size in _memory(self.regions).values())

    def snapshot(self) -> State:
        """The same in memory of its own, on the CPU: later updates do not change it."""
        copies: dict[Any, torch.Tensor] = {}
        kept = []
        for region in self.regions:
            place = _identity(region.values)
            if place not in copies:
                copies[place] = region.values.detach().to("cpu", copy=True).reshape(-1)
            kept.append(replace(region, values=copies[place].view(region.values.shape)))
        return replace(self, regions=kept)

    def with_(self, other: State) -> State:
        """Both, as one checkpoint; their names differ."""
        return State(
            [*self.regions, *other.regions],
            self.objects | other.objects,
            self.common | other.common,
        )


def _identity(values: torch.Tensor) -> tuple[Any, ...]:
    """Equal for regions that are the same memory: a float32 weight is its own master copy."""
    return values.data_ptr(), values.numel(), values.dtype, values.device


def _memory(parts: Iterable[Region]) -> dict[Any, int]:
    return {_identity(r.values): r.values.numel() * r.values.itemsize for r in parts}


@dataclass(frozen=True)
class Written:
    """What a rank wrote: plain values, for other processes. `files`: size and digest by name."""

    items: list[list[Any]]
    files: dict[str, tuple[int, str]]


def _random_key(rank: int, size: int) -> str:
    return str(ShardedObject("random", None, (size,), (rank,)).unique_key)


def collect(
    model: PolicyModel, optimizer: Optimizer | None = None, extra: dict[str, Any] | None = None
) -> State:
    """The model and, when given, the optimizer and this rank's random state.

    Of a model with adapters these alone are stored, not what is frozen. `extra` holds plain
    values, equal on all ranks.
    """
    state = _of_model(model, optimizer)
    state.common["extra"] = extra or {}
    if optimizer is not None:
        rank, size = dist.get_rank(), dist.get_world_size()
        state.common["layout"] = {"steps": optimizer.steps, "ranks": size}
        state.objects[_random_key(rank, size)] = random_state()
    return state


def collect_named(
    name: str, model: PolicyModel, optimizer: Optimizer, extra: dict[str, Any]
) -> State:
    """A second model with its optimizer, to be saved with the first one; its tensors are stored
    under `name.` and their usual names."""
    state = _of_model(model, optimizer)
    return State(
        [replace(region, key=f"{name}.{region.key}") for region in state.regions],
        {f"{name}.{key}": value for key, value in state.objects.items()},
        {name: {"steps": optimizer.steps, "extra": extra}},
    )


def _trained(model: PolicyModel) -> dict[str, Any]:
    """What a checkpoint holds of a model: its adapters if it has some, else all of it."""
    return model.sharded_state_dict() if model.lora is None else dict(model.lora.sharded_state())


def _of_model(model: PolicyModel, optimizer: Optimizer | None) -> State:
    described = _trained(model)
    objects: dict[str, Any] = {
        value.unique_key: None
        for value in described.values()
        if isinstance(value, ShardedObject) and is_main_replica(value.replica_id)
    }
    parts = list(_model_regions(described, optimizer))
    if optimizer is not None:
        parts += optimizer.state_regions(described, saving=True)
    return State(parts, objects, {})


def _model_regions(described: dict[str, Any], optimizer: Optimizer | None) -> Iterator[Region]:
    """Of a trained parameter each data-parallel rank stores what its optimizer updates."""
    ranges = {} if optimizer is None else optimizer.own_ranges()
    for value in tensors(described):
        trained = optimizer is not None and value.data.requires_grad
        if not is_writer(value, of_ranges=trained):
            continue
        if not trained:
            yield from regions(value)
        elif value.data in ranges:
            own = ranges[value.data]
            yield from regions(value, flat=value.data.detach().view(-1)[own], start=own.start)


def write(directory: Path, state: State, rank: int) -> Written:
    """Write this rank's files, durably. Raises OSError that names the file."""
    groups: list[list[Region]] = [[] for _ in range(FILES_PER_RANK)]
    sizes = [0] * FILES_PER_RANK
    for region in state.regions:
        smallest = sizes.index(min(sizes))
        groups[smallest].append(region)
        sizes[smallest] += region.values.numel() * region.values.itemsize

    def write_one(number: int) -> tuple[list[Item], str, tuple[int, str]]:
        path = directory / f"__{rank}_{number}.distcp"
        with ShardFile(path) as file:
            for region in groups[number]:
                file.add(replace(region, values=region.values.cpu()))
            for key, value in state.objects.items() if number == 0 else ():
                file.add_object(key, value)
        return file.items, path.name, file.digest

    with ThreadPoolExecutor(FILES_PER_RANK) as pool:
        done = list(pool.map(write_one, range(FILES_PER_RANK)))
    items = [item.plain() for own, _, _ in done for item in own]
    return Written(items, {name: size_and_digest for _, name, size_and_digest in done})


def complete(directory: Path, written: list[Written], common: dict[str, Any]) -> None:
    """Make the files of all ranks a checkpoint: write its index and plain values."""
    items = [Item.of(fields) for part in written for fields in part.items]
    write_index(directory, items, common)


def save(
    directory: str | Path,
    model: PolicyModel,
    optimizer: Optimizer | None = None,
    extra: dict[str, Any] | None = None,
) -> None:
    """Collect and write everything, and wait for it. Collective. `directory` must exist."""
    state = collect(model, optimizer, extra)
    written = gather(write(Path(directory), state, dist.get_rank()))
    if written is not None:
        complete(Path(directory), written, state.common)
    dist.barrier()


def gather(written: Written) -> list[Written] | None:
    """What all ranks wrote, on rank 0. Collective."""
    everyone: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(written, everyone)
    return everyone


def load(
    directory: str | Path,
    model: PolicyModel,
    optimizer: Optimizer | None = None,
    leave_out: str | None = None,
) -> dict[str, Any] | None:
    """Load the model, or its adapters; the optimizer and the random state too when both sides
    have one.

    The parameter called `leave_out` stays as it is. Returns `extra` of a checkpoint that was saved
    with an optimizer, else None. The random state is restored only into the same number of ranks.
    Raises KeyError or ValueError that name a tensor of which the directory does not hold what the
    model needs.
    """
    reader = ShardReader(Path(directory))
    common = _common(directory)
    layout = common.get("layout")
    steps = None if layout is None else layout["steps"]
    _fill(reader, "", model, optimizer, steps, leave_out)
    if optimizer is None or layout is None:
        return None if layout is None else common["extra"]
    if layout["ranks"] == dist.get_world_size():
        with torch.serialization.safe_globals(SAFE):
            set_random_state(reader.object(_random_key(dist.get_rank(), layout["ranks"])))
    extra: dict[str, Any] = common["extra"]
    return extra


def load_base(directory: str | Path, model: PolicyModel) -> None:
    """Load a converted model; adapters are left as they are. Raises as `load`."""
    reader = ShardReader(Path(directory))
    for value in tensors(model.sharded_state_dict()):
        for region in regions(value):
            reader.fill(region)


def has(directory: str | Path, name: str) -> bool:
    """Whether a checkpoint holds a second model of that name."""
    return name in _common(directory)


def load_named(
    directory: str | Path, name: str, model: PolicyModel, optimizer: Optimizer | None = None
) -> dict[str, Any]:
    """Load what `collect_named` gave; its `extra`. Raises as `load`."""
    common = _common(directory)[name]
    reader = ShardReader(Path(directory))
    _fill(reader, f"{name}.", model, optimizer, common["steps"])
    extra: dict[str, Any] = common["extra"]
    return extra


def _common(directory: str | Path) -> dict[str, Any]:
    values: dict[str, Any] = torch.load(Path(directory) / "common.pt", weights_only=True)
    return values


def _fill(
    reader: ShardReader,
    prefix: str,
    model: PolicyModel,
    optimizer: Optimizer | None,
    steps: int | None,
    leave_out: str | None = None,
) -> None:
    """Fill a model, and its optimizer from a state after `steps` updates; without one from the
    weights alone."""
    described = _trained(model)
    if leave_out is not None:
        described.pop(leave_out, None)
    wanted = [region for value in tensors(described) for region in regions(value)]
    if optimizer is not None and steps is not None:
        wanted += optimizer.state_regions(described, saving=False)
    for region in wanted:
        reader.fill(replace(region, key=prefix + region.key))
    if optimizer is None:
        return
    if steps is None:
        optimizer.weights_were_replaced()
    else:
        optimizer.set_steps(steps)
