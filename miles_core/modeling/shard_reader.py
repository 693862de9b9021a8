"""Reading the index of a `torch_dist` directory, and regions of its tensors."""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from miles_core.modeling.mapped import Window, map_tensor
from miles_core.modeling.regions import Region
from miles_core.modeling.shard_map import Piece
from miles_core.modeling.sharded_files import INDEX, coverage_fault


class _IndexUnpickler(pickle.Unpickler):
    """Builds what an index is made of and refuses to call anything else."""

    _KNOWN = {
        "torch.distributed.checkpoint.metadata": {
            "_MEM_FORMAT_ENCODING",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
        },
        "torch.distributed.checkpoint.planner": {
            "SavePlan",
            "TensorWriteData",
            "WriteItem",
            "WriteItemType",
        },
        "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
        "torch.serialization": {"_get_layout"},
    }

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch":
            allowed = name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)
        else:
            allowed = name in self._KNOWN.get(module, ())
        if not allowed:
            raise pickle.UnpicklingError(f"an index of shards holds no {module}.{name}")
        return super().find_class(module, name)


def read_index(directory: Path) -> Metadata:
    """Which tensors a directory holds, and where. Raises ValueError when it cannot be read."""
    try:
        with open(directory / INDEX, "rb") as file:
            index = _IndexUnpickler(file).load()
    except (pickle.UnpicklingError, EOFError, AttributeError, IndexError, TypeError) as error:
        raise ValueError(f"{directory / INDEX} cannot be read: {error}") from error
    if not isinstance(index, Metadata):
        raise ValueError(f"{directory / INDEX} is no index of shards")
    return index


def index_problem(directory: Path) -> str | None:
    """What an index misses: a region of a tensor, or a file that holds one. None when whole."""
    index = read_index(directory)
    for place, info in index.storage_data.items():
        path = directory / info.relative_path
        size = path.stat().st_size if path.is_file() else -1
        if size < info.offset + info.length:
            return f"{info.relative_path} does not hold all of {place.fqn}"
    faults = (coverage_fault(key, entry) for key, entry in index.state_dict_metadata.items())
    return next((fault for fault in faults if fault is not None), None)


class ShardReader:
    """Reads regions of the tensors of a directory, from whichever layout they were saved.

    `index`: of a directory that has none yet.
    """

    def __init__(self, directory: Path, index: Metadata | None = None) -> None:
        self._directory = directory
        self.index = read_index(directory) if index is None else index

    def dtype(self, key: str) -> torch.dtype:
        """The dtype that a tensor is stored in."""
        return self._entry(key).properties.dtype

    def _entry(self, key: str) -> TensorStorageMetadata:
        entry = self.index.state_dict_metadata.get(key)
        if not isinstance(entry, TensorStorageMetadata):
            raise KeyError(f"{self._directory} holds no tensor {key!r}")
        return entry

    @contextmanager
    def _stored(
        self, key: str, offset: torch.Size | None
    ) -> Iterator[tuple[_StorageInfo, io.BufferedReader]]:
        """Where a value lies, and its bytes as a file."""
        info = self.index.storage_data[MetadataIndex(key, offset)]
        path = self._directory / info.relative_path
        if path.stat().st_size < info.offset + info.length:
            raise ValueError(f"{path} does not hold all of {key}")
        with open(path, "rb") as file:
            yield info, io.BufferedReader(Window(file, info.offset, info.length))

    def _chunk(self, key: str, chunk: ChunkStorageMetadata) -> torch.Tensor:
        with self._stored(key, chunk.offsets) as (info, view):
            path = self._directory / info.relative_path
            shape = tuple(chunk.sizes)
            value = map_tensor(path, view, info.offset, self.dtype(key), shape)
            if value is None:
                view.seek(0)
                value = torch.load(view, weights_only=True, map_location="cpu")
        assert isinstance(value, torch.Tensor)
        return value

    def object(self, key: str) -> Any:
        """An object that was stored under `key`; plain values and tensors."""
        with self._stored(key, None) as (_, view):
            (value,) = torch.load(view, weights_only=True, map_location="cpu")
        return value

    @torch.no_grad()
    def fill(self, region: Region) -> None:
        """Copy stored values into a region. Raises KeyError or ValueError when there are none."""
        entry = self._entry(region.key)
        if tuple(entry.size) != region.whole:
            raise ValueError(
                f"{region.key} has shape {tuple(entry.size)} in {self._directory}, "
                f"not {region.whole}"
            )
        target, filled = region.values, 0
        for chunk in entry.chunks:
            low = [max(a, b) for a, b in zip(chunk.offsets, region.offset, strict=True)]
            ends = zip(chunk.offsets, chunk.sizes, region.offset, target.shape, strict=True)
            high = [min(a + n, b + m) for a, n, b, m in ends]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            into, out_of = target, self._chunk(region.key, chunk)
            for dim, (a, b) in enumerate(zip(low, high, strict=True)):
                into = into.narrow(dim, a - region.offset[dim], b - a)
                out_of = out_of.narrow(dim, a - chunk.offsets[dim], b - a)
            into.copy_(out_of)
            filled += into.numel()
        if filled != target.numel():
            raise ValueError(f"{self._directory} holds only a part of {region.key}")

    def tensor(self, key: str) -> torch.Tensor:
        """A stored tensor as a whole, in the stored dtype."""
        shape = tuple(self._entry(key).size)
        strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        piece = Piece(key, shape, (0,) * len(shape), shape, shape, strides, 0)
        return self.parameter([piece], shape)

    def parameter(self, pieces: list[Piece], shape: tuple[int, ...]) -> torch.Tensor:
        """A whole parameter, put together from its pieces, in the stored dtype.

        Where it is stored in one piece its memory is that of the file's pages.
        """
        if len(pieces) == 1 and math.prod(pieces[0].sizes) == math.prod(shape):
            chunk = self._chunk_of(pieces[0])
            if chunk is not None:
                return self._chunk(pieces[0].key, chunk).view(shape)
        value = torch.empty(shape, dtype=self.dtype(pieces[0].key))
        for piece in pieces:
            self.fill(piece.region(value))
        return value

    def _chunk_of(self, piece: Piece) -> ChunkStorageMetadata | None:
        """The chunk that is the piece, when one is."""
        for chunk in self._entry(piece.key).chunks:
            if tuple(chunk.offsets) == piece.offset and tuple(chunk.sizes) == piece.sizes:
                return chunk
        return None
