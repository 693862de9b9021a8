"""Tensors in shared memory, passed between processes of one machine in SGLang's wire form.

The form is base64 of a pickle by which torch names a shared file ("file_system" sharing), so that
only names and sizes go over HTTP. Unlike file descriptors, a name needs no common secret of the
two processes. The pickle is read with nothing allowed but what builds such tensors.
"""

from __future__ import annotations

import base64
import contextlib
import io
import mmap
import pickle
import shutil
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

SHM = Path("/dev/shm")
NamedTensor = tuple[str, torch.Tensor]

_ALLOWED = frozenset(
    {
        ("torch", "Size"),
        ("torch", "Tensor"),
        ("torch._tensor", "Tensor"),
        ("torch.storage", "UntypedStorage"),
        ("torch", "UntypedStorage"),
        ("torch.multiprocessing.reductions", "rebuild_tensor"),
        ("torch.multiprocessing.reductions", "rebuild_typed_storage"),
        ("torch.multiprocessing.reductions", "rebuild_storage_filename"),
        *(
            ("torch", str(dtype).removeprefix("torch."))
            for dtype in (
                torch.float64,
                torch.float32,
                torch.float16,
                torch.bfloat16,
                torch.int64,
                torch.int32,
            )
        ),
    }
)


class PayloadError(ValueError):
    """A payload that does not hold named tensors in shared memory."""


def room() -> int:
    """Bytes that are free in shared memory; 0 where there is none."""
    try:
        return shutil.disk_usage(SHM).free
    except OSError:
        return 0


def machine_id() -> str:
    """The same for all processes that share this machine's memory, until it is booted again."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class SharedBuffer:
    """`size` bytes of shared memory, zero at first. `close` frees them, once for all readers."""

    def __init__(self, size: int) -> None:
        if room() < size:
            raise MemoryError(f"{SHM} has {room()} bytes free, of which {size} are needed")
        storage = torch.UntypedStorage._new_using_filename_cpu(max(size, 1))
        self._path = SHM / storage._share_filename_cpu_()[1].decode().lstrip("/")
        self.bytes = torch.empty(0, dtype=torch.uint8).set_(storage)

    def close(self) -> None:
        """Give the memory back, also where a reader never took its payload and so keeps the file
        alive for torch, which counts readers in the first page. Who still reads then sees zeros.
        """
        self.bytes = torch.empty(0, dtype=torch.uint8)
        with (
            contextlib.suppress(FileNotFoundError),
            self._path.open("r+b") as file,
            mmap.mmap(file.fileno(), 0) as memory,
        ):
            if len(memory) > mmap.PAGESIZE:
                memory.madvise(mmap.MADV_REMOVE, mmap.PAGESIZE, len(memory) - mmap.PAGESIZE)


def payload(tensors: Sequence[NamedTensor]) -> str:
    """The wire form of views of a SharedBuffer; each can be read once."""
    before = mp.get_sharing_strategy()
    mp.set_sharing_strategy("file_system")
    try:
        buffer = io.BytesIO()
        ForkingPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(list(tensors))
    finally:
        mp.set_sharing_strategy(before)
    return base64.b64encode(buffer.getvalue()).decode()


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise PayloadError(
                f"the payload asks for {module}.{name}; only tensors that torch shares by file "
                f"name are taken"
            )
        return super().find_class(module, name)


def read_payload(text: str) -> list[NamedTensor]:
    """The tensors of a payload, in the writer's memory: copy what is to be kept.

    Raises PayloadError for anything else, and when the memory is gone.
    """
    try:
        value = _Unpickler(io.BytesIO(base64.b64decode(text, validate=True))).load()
    except PayloadError:
        raise
    # Broken bytes make pickle and torch raise nearly anything.
    except Exception as error:
        raise PayloadError(f"the payload cannot be read: {error}") from error
    if not isinstance(value, list):
        raise PayloadError("the payload holds no list of named tensors")
    for item in value:
        named = isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)
        if not named or not isinstance(item[1], torch.Tensor):
            raise PayloadError("the payload holds something else than named tensors")
    return value
