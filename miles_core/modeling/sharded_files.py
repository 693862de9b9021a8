"""The files of a `torch_dist` directory, written and read tensor by tensor.

The format is that of torch.distributed.checkpoint, as megatron-core lays it out: `.distcp` files
hold values that torch.save wrote one behind the other, `.metadata` (a pickle) says which region of
which tensor lies where, `common.pt` holds plain values, `metadata.json` names the format.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import pickle
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.utils import _create_file_view

from miles_core.modeling.shard_map import Piece

INDEX = ".metadata"
FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


@dataclass(frozen=True)
class Item:
    """One value of a file: a region of a tensor (`sizes` not None) or an object."""

    key: str
    offset: tuple[int, ...] | None
    sizes: tuple[int, ...] | None
    whole: tuple[int, ...] | None
    dtype: str | None
    file: str
    place: int
    length: int


@contextmanager
def without_crc32() -> Iterator[None]:
    """torch.save leaves out its own check sums: every file has a SHA-256 in the manifest."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


class ShardFile:
    """A `.distcp` file that is being written; its digest is known when it is done."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stream = open(path, "wb")  # noqa: SIM115 - closed by `close`
        self._hash = hashlib.sha256()
        self._size = 0
        self.items: list[Item] = []

    def write(self, data: bytes) -> int:
        """For torch.save: to the disk and into the digest."""
        self._hash.update(data)
        written = self._stream.write(data)
        self._size += written
        return written

    def flush(self) -> None:
        self._stream.flush()

    def add(self, piece: Piece, parameter: torch.Tensor) -> None:
        """Append a piece of a parameter (contiguous, on the CPU)."""
        value = piece.of(parameter)
        if value.numel() * value.itemsize != value.untyped_storage().nbytes():
            value = value.clone()
        place = self._size
        torch.save(value, cast(IO[bytes], self))
        dtype = str(value.dtype).removeprefix("torch.")
        self._keep(piece.key, piece.offset, piece.sizes, piece.whole, dtype, place)

    def add_empty(self, key: str) -> None:
        """Append the empty object that megatron keeps under `key`."""
        place = self._size
        torch.save([None], cast(IO[bytes], self))
        self._keep(key, None, None, None, None, place)

    def _keep(self, key: str, offset: Any, sizes: Any, whole: Any, dtype: Any, place: int) -> None:
        length = self._size - place
        self.items.append(Item(key, offset, sizes, whole, dtype, self._path.name, place, length))

    def close(self) -> tuple[int, str]:
        """Make the file durable; its size and SHA-256."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
        return self._size, self._hash.hexdigest()


def write_index(directory: Path, items: Iterable[Item], common: dict[str, Any]) -> None:
    """Complete a directory of shard files so that it can be loaded."""
    tensors: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for item in items:
        offset = None if item.offset is None else torch.Size(item.offset)
        places[MetadataIndex(item.key, offset)] = _StorageInfo(item.file, item.place, item.length)
        if item.sizes is None or item.whole is None or item.dtype is None:
            tensors[item.key] = BytesStorageMetadata()
            continue
        assert offset is not None
        entry = tensors.setdefault(
            item.key,
            TensorStorageMetadata(
                TensorProperties(dtype=getattr(torch, item.dtype)), torch.Size(item.whole), []
            ),
        )
        entry.chunks.append(ChunkStorageMetadata(offset, torch.Size(item.sizes)))
    with open(directory / INDEX, "wb") as file:
        pickle.dump(Metadata(tensors, None, places), file)
    torch.save(common, directory / "common.pt")
    (directory / "metadata.json").write_text(json.dumps(FORMAT))


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
    for key, entry in index.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            held = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
            if held != math.prod(entry.size):
                return f"{key} has {math.prod(entry.size)} values, of which {held} are stored"
    return None


class ShardReader:
    """Reads regions of the tensors of a directory, from whichever layout they were saved."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.index = read_index(directory)

    def dtype(self, key: str) -> torch.dtype:
        """The dtype that a tensor is stored in."""
        return self._entry(key).properties.dtype

    def _entry(self, key: str) -> TensorStorageMetadata:
        entry = self.index.state_dict_metadata.get(key)
        if not isinstance(entry, TensorStorageMetadata):
            raise KeyError(f"{self._directory} holds no tensor {key!r}")
        return entry

    def _chunk(self, key: str, chunk: ChunkStorageMetadata) -> torch.Tensor:
        info = self.index.storage_data[MetadataIndex(key, chunk.offsets)]
        with open(self._directory / info.relative_path, "rb") as file:
            view = cast(IO[bytes], _create_file_view(file, info.offset, info.length))
            value = torch.load(view, weights_only=True, map_location="cpu")
        assert isinstance(value, torch.Tensor)
        return value

    def fill(self, piece: Piece, parameter: torch.Tensor) -> None:
        """Copy a piece's values into a parameter (contiguous)."""
        entry = self._entry(piece.key)
        if tuple(entry.size) != piece.whole:
            raise ValueError(
                f"{piece.key} has shape {tuple(entry.size)} in {self._directory}, not {piece.whole}"
            )
        target = torch.as_strided(parameter, piece.part, piece.stride, piece.start)
        target = target.view(piece.sizes)
        filled = 0
        for chunk in entry.chunks:
            low = [max(a, b) for a, b in zip(chunk.offsets, piece.offset, strict=True)]
            high = [
                min(a + n, b + m)
                for a, n, b, m in zip(
                    chunk.offsets, chunk.sizes, piece.offset, piece.sizes, strict=True
                )
            ]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            value = self._chunk(piece.key, chunk)
            into, out_of = target, value
            for dim, (a, b) in enumerate(zip(low, high, strict=True)):
                into = into.narrow(dim, a - piece.offset[dim], b - a)
                out_of = out_of.narrow(dim, a - chunk.offsets[dim], b - a)
            into.copy_(out_of)
            filled += into.numel()
        if filled != target.numel():
            raise ValueError(f"{self._directory} holds only a part of {piece.key}")

    def tensor(self, key: str) -> torch.Tensor:
        """A stored tensor as a whole, in the stored dtype."""
        shape = tuple(self._entry(key).size)
        strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        piece = Piece(key, shape, (0,) * len(shape), shape, shape, strides, 0)
        return self.parameter([piece], shape)

    def parameter(self, pieces: list[Piece], shape: tuple[int, ...]) -> torch.Tensor:
        """A whole parameter, put together from its pieces, in the stored dtype."""
        value = torch.empty(shape, dtype=self.dtype(pieces[0].key))
        for piece in pieces:
            self.fill(piece, value)
        return value
