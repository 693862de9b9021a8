"""A tensor that torch.save wrote somewhere inside a file, mapped into memory instead of read.

torch.save writes a zip archive whose records are not compressed: `data.pkl` describes the tensor,
`data/0` holds its values.
"""

from __future__ import annotations

import errno
import io
import math
import mmap
import os
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import IO, Any, BinaryIO

import torch

_LOCAL_HEADER = 30  # bytes of a zip record's header before its name


class Window(io.RawIOBase):
    """A part of a file, `length` bytes from `start` on, as a file of its own."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._place = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._length}[whence]
        if origin + offset < 0:
            raise OSError(errno.EINVAL, "a place before the start")
        self._place = origin + offset
        return self._place

    def readinto(self, buffer: Any) -> int:
        wanted = memoryview(buffer)[: max(0, self._length - self._place)]
        self._file.seek(self._start + self._place)
        count = self._file.readinto(wanted)  # type: ignore[attr-defined]
        self._place += count
        return int(count)


class _Description(pickle.Unpickler):
    """Reads how a tensor is laid out in its storage; makes nothing else."""

    def persistent_load(self, identity: Any) -> Any:
        return identity

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda *args: args
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch" and name.endswith("Storage"):
            return name
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a plain tensor")


def _is_plain(description: Any, shape: tuple[int, ...]) -> bool:
    """Whether a tensor of this shape is all of its storage, row by row."""
    if not isinstance(description, tuple) or len(description) < 4:
        return False
    _, start, size, stride, *_ = description
    rows = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    same = all(n == 1 or a == b for n, a, b in zip(shape, stride, rows, strict=True))
    return start == 0 and tuple(size) == shape and same


def _content(view: IO[bytes], record: zipfile.ZipInfo) -> int:
    """Where in the archive the content of a record begins."""
    view.seek(record.header_offset + _LOCAL_HEADER - 4)
    lengths = view.read(4)
    name, extra = (int.from_bytes(lengths[i : i + 2], "little") for i in (0, 2))
    return record.header_offset + _LOCAL_HEADER + name + extra


def map_tensor(
    path: Path, view: IO[bytes], place: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> torch.Tensor | None:
    """The tensor in the archive `view`, which begins at byte `place` of the file.

    Pages are read when they are used and not kept; writing into the tensor leaves the file as it
    is. None when it is stored in another way than plainly. Raises ValueError for a damaged file.
    """
    try:
        with zipfile.ZipFile(view) as archive:
            records = {name.partition("/")[2]: name for name in archive.namelist()}
            if "data.pkl" not in records or "data/0" not in records:
                return None
            about, record = (archive.getinfo(records[name]) for name in ("data.pkl", "data/0"))
        if any(r.compress_type != zipfile.ZIP_STORED for r in (about, record)):
            return None
        # Not with `archive.open`: the check sums of the archive may have been left out.
        view.seek(_content(view, about))
        description = _Description(io.BytesIO(view.read(about.file_size))).load()
    except pickle.UnpicklingError:
        return None
    except (zipfile.BadZipFile, EOFError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    count = math.prod(shape)
    if not _is_plain(description, shape) or count == 0:
        return None
    if record.file_size != count * dtype.itemsize:
        return None
    first = place + _content(view, record)
    before = first % mmap.ALLOCATIONGRANULARITY
    with open(path, "rb") as file:
        pages = mmap.mmap(
            file.fileno(), before + record.file_size, access=mmap.ACCESS_COPY, offset=first - before
        )
    return torch.frombuffer(pages, dtype=dtype, count=count, offset=before).view(shape)
