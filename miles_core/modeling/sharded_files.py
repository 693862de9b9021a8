"""The files of a `torch_dist` directory, written tensor by tensor.

The format is that of torch.distributed.checkpoint, as megatron-core lays it out: `.distcp` files
hold values that torch.save wrote one behind the other, `.metadata` (a pickle) says which region of
which tensor lies where, `common.pt` holds plain values, `metadata.json` names the format.
"""

from __future__ import annotations

import json
import math
import os
import pickle
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self, cast

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

from miles_core import digest
from miles_core.modeling.regions import Region

INDEX = ".metadata"
FORMAT_FILE = "metadata.json"
ALIGNMENT = 64
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

    def plain(self) -> list[Any]:
        """The fields in order, for JSON."""
        return list(vars(self).values())

    @staticmethod
    def of(fields: list[Any]) -> Item:
        """Inverse of `plain`."""
        values: list[Any] = [tuple(f) if isinstance(f, list) else f for f in fields]
        return Item(*values)


@contextmanager
def _without_crc32() -> Iterator[None]:
    """torch.save leaves out its own check sums: every file has a digest in the manifest.

    For the thread that calls it: torch keeps this setting for each thread.
    """
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def _alone(value: torch.Tensor) -> torch.Tensor:
    """The same memory as a storage of its own: torch.save writes whole storages."""
    if value.numel() * value.itemsize == value.untyped_storage().nbytes():
        return value
    plain = value.reshape(-1).view(torch.uint8).numpy()
    return torch.from_numpy(plain).view(value.dtype).view(value.shape)


class ShardFile:
    """A `.distcp` file that is being written, a context; `digest` (size and digest) is known when
    it is done, and the file is durable then. Raises OSError that names the file."""

    digest: tuple[int, str]

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stream = open(path, "wb")  # noqa: SIM115 - closed by `close`
        self._digest = digest.new()
        self._size = 0
        self._fault: OSError | None = None
        self.items: list[Item] = []

    def write(self, data: bytes) -> int:
        """For torch.save: to the disk and into the digest."""
        self._digest.update(data)
        try:
            written = self._stream.write(data)
        except OSError as error:
            self._fault = error
            raise
        self._size += written
        return written

    def flush(self) -> None:
        self._stream.flush()

    def add(self, region: Region) -> None:
        """Append a region's values, which are on the CPU."""
        value = _alone(region.values.detach().contiguous())
        self.write(bytes(-self._size % ALIGNMENT))  # as torch.save aligns values in its archive
        place = self._size
        self._save(value)
        dtype = str(value.dtype).removeprefix("torch.")
        self._keep(region.key, region.offset, tuple(value.shape), region.whole, dtype, place)

    def add_object(self, key: str, value: Any) -> None:
        """Append an object under the key of megatron's `ShardedObject`."""
        place = self._size
        self._save([value])
        self._keep(key, None, None, None, None, place)

    def _save(self, value: Any) -> None:
        """torch.save, which would hide what the disk said."""
        try:
            with _without_crc32():
                torch.save(value, cast(IO[bytes], self))
        except (OSError, RuntimeError):
            if self._fault is None:
                raise
            raise self._named(self._fault) from self._fault

    def _named(self, error: OSError) -> OSError:
        return OSError(error.errno, error.strerror, str(self._path))

    def _keep(self, key: str, offset: Any, sizes: Any, whole: Any, dtype: Any, place: int) -> None:
        length = self._size - place
        self.items.append(Item(key, offset, sizes, whole, dtype, self._path.name, place, length))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            with self._stream:
                if kind is None:
                    self._stream.flush()
                    os.fsync(self._stream.fileno())
        except OSError as error:
            if kind is None:
                raise self._named(error) from error
        self.digest = self._size, self._digest.hexdigest()


def coverage_fault(key: str, entry: Any) -> str | None:
    """What is wrong when the regions of a tensor in an index do not make up the whole of it."""
    if not isinstance(entry, TensorStorageMetadata):
        return None
    held, wanted = sum(math.prod(chunk.sizes) for chunk in entry.chunks), math.prod(entry.size)
    return None if held == wanted else f"{key} has {wanted} values, of which {held} are stored"


def index_of(items: Iterable[Item]) -> Metadata:
    """The index of what the items describe."""
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
    return Metadata(tensors, None, places)


def write_index(directory: Path, items: Iterable[Item], common: dict[str, Any]) -> None:
    """Complete a directory of shard files so that it can be loaded.

    Raises ValueError when a tensor is not stored whole.
    """
    index = index_of(items)
    for key, entry in index.state_dict_metadata.items():
        fault = coverage_fault(key, entry)
        if fault is not None:
            raise ValueError(fault)
    with open(directory / INDEX, "wb") as file:
        pickle.dump(index, file)
    torch.save(common, directory / "common.pt")
    (directory / FORMAT_FILE).write_text(json.dumps(FORMAT))
