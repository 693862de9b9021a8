"""What a torch_dist directory holds, from its index and small files; no weight is read."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_core.checkpoints import manifest, store
from miles_core.checkpoints.layout import HF_DIR, LORA_FILE, STATE_FILE

SECTIONS = ("model", "adapters", "optimizer", "critic", "critic.optimizer", "random", "objects")
_STARTS = {"base_model": "adapters"}


@dataclass(frozen=True)
class Section:
    """Tensors of one purpose: their number, values, bytes, and values by dtype. For `random` and
    `objects` the number of objects."""

    name: str
    entries: int
    values: int
    bytes: int
    dtypes: dict[str, int]


@dataclass(frozen=True)
class Tensor:
    """A stored tensor: its whole shape, and in how many parts it lies."""

    name: str
    section: str
    shape: list[int]
    dtype: str
    parts: int


@dataclass(frozen=True)
class Contents:
    """A torch_dist directory. `steps` optimizer steps by `ranks` ranks, None for a conversion.
    `adapters`: rank, alpha, layers, and the model under them, if it holds adapters alone."""

    path: str
    kind: str
    iteration: int | None
    weight_version: int | None
    model_type: str | None
    steps: int | None
    ranks: int | None
    cursor: dict[str, Any] | None
    fingerprint: str | None
    adapters: dict[str, Any] | None
    files: dict[str, int]
    sections: list[Section]
    tensors: list[Tensor]


def checkpoint_of(path: Path) -> Path:
    """The torch_dist directory that a path names: itself, or the newest whole one of a folder of
    checkpoints. Raises FileNotFoundError for neither, UserError when none is whole."""
    if (path / "metadata.json").is_file():
        return path
    found = store.latest(path)
    if found is None:
        raise FileNotFoundError(f"{path} is neither a checkpoint nor a folder of checkpoints")
    return found.path


def checkpoints_of(path: Path) -> list[Path]:
    """All torch_dist directories that a path names, whole or not, newest first."""
    if (path / "metadata.json").is_file() or manifest.read(path) is not None:
        return [path]
    found = store.published(path)
    if not found:
        raise FileNotFoundError(f"{path} is neither a checkpoint nor a folder of checkpoints")
    return found


def _section(key: str) -> str:
    for name in ("optimizer", "critic.optimizer", "critic", "random", "base_model"):
        if key.startswith(f"{name}."):
            return _STARTS.get(name, name)
    return "model"


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}


def contents(directory: Path) -> Contents:
    """What a directory holds. Raises ValueError when its index cannot be read."""
    import torch
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from miles_core.modeling.shard_reader import read_index

    tensors, objects = [], Counter[str]()
    for key, entry in read_index(directory).state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            objects["random" if key.startswith("random/") else "objects"] += 1
            continue
        dtype = str(entry.properties.dtype).removeprefix("torch.")
        tensors.append(Tensor(key, _section(key), list(entry.size), dtype, len(entry.chunks)))
    sections = []
    for name in SECTIONS:
        own = [tensor for tensor in tensors if tensor.section == name]
        dtypes: Counter[str] = Counter()
        for tensor in own:
            dtypes[tensor.dtype] += math.prod(tensor.shape)
        size = sum(count * getattr(torch, dtype).itemsize for dtype, count in dtypes.items())
        number = len(own) or objects[name]
        if number:
            sections.append(Section(name, number, sum(dtypes.values()), size, dict(dtypes)))
    about = manifest.read(directory) or {}
    state = _json(directory / STATE_FILE)
    layout = torch.load(directory / "common.pt", weights_only=True).get("layout") or {}
    return Contents(
        path=str(directory),
        kind=about.get("kind", "checkpoint"),
        iteration=state.get("iteration"),
        weight_version=state.get("weight_version"),
        model_type=_json(directory / HF_DIR / "config.json").get("model_type"),
        steps=layout.get("steps"),
        ranks=layout.get("ranks"),
        cursor=state.get("cursor"),
        fingerprint=about.get("fingerprint"),
        adapters=_json(directory / LORA_FILE) or None,
        files={name: entry["size"] for name, entry in about.get("files", {}).items()},
        sections=sections,
        tensors=tensors,
    )
