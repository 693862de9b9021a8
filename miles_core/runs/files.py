"""Files that survive a crash: atomic replacement, durable line files, content fingerprints."""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson

from miles_core.regular_files import of_kernel, why_unreadable

_TAIL_CHUNK = 64 * 1024


def _jsonable(value: Any) -> Any:
    if hasattr(value, "model_dump"):  # a pydantic model; importing pydantic is slow
        return value.model_dump(mode="json")
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


def dumps(obj: Any, *, pretty: bool = False, sort: bool = False) -> bytes:
    """JSON bytes; non-finite floats become null, models, paths and numpy values are understood."""
    option = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
    if pretty:
        option |= orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
    if sort:
        option |= orjson.OPT_SORT_KEYS
    return orjson.dumps(obj, default=_jsonable, option=option)


def sync_dir(directory: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomic(path: str | Path, data: bytes) -> None:
    """Replace `path` by `data`: a reader, or a crash, sees the old content or the new one.

    The data is written to a hidden file beside it, synced, renamed, and the directory is synced.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, tmp = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            os.fsync(file.fileno())
        os.replace(tmp, path)
    except BaseException:
        Path(tmp).unlink(missing_ok=True)
        raise
    sync_dir(path.parent)


def write_json(path: str | Path, obj: Any) -> None:
    """Write `obj` as indented JSON with `write_atomic`."""
    write_atomic(path, dumps(obj, pretty=True))


def read_json(path: str | Path) -> Any:
    """The content of a JSON file."""
    return orjson.loads(Path(path).read_bytes())


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def last_line(fd: int) -> tuple[bytes, int]:
    """The last complete line of an open file and the offset at which it ends (0: none)."""
    end = os.fstat(fd).st_size
    tail = b""
    start = end
    while start > 0:
        step = min(_TAIL_CHUNK, start)
        start -= step
        tail = os.pread(fd, step, start) + tail
        stop = tail.rfind(b"\n")
        if stop < 0:
            continue
        begin = tail.rfind(b"\n", 0, stop)
        if begin >= 0 or start == 0:
            return tail[begin + 1 : stop], start + stop + 1
    return b"", 0


class LineFile:
    """Append-only file of lines, each durable before `append` returns.

    A line is there once its newline is: what a crash left behind the last newline is cut off by
    the next append. A file lock of the kernel's orders appends of several processes.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fresh = not self.path.exists()
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if fresh:
            sync_dir(self.path.parent)
        self._end = -1
        self._last = b""

    def append(self, make_line: Callable[[bytes], bytes]) -> bytes:
        """Append `make_line(last complete line)` (without newline); returns the line."""
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            if os.fstat(self._fd).st_size != self._end:
                self._last, self._end = last_line(self._fd)
                os.ftruncate(self._fd, self._end)
            line = make_line(self._last)
            os.lseek(self._fd, self._end, os.SEEK_SET)
            try:
                _write_all(self._fd, line + b"\n")
                os.fsync(self._fd)
            except OSError:
                os.ftruncate(self._fd, self._end)
                raise
            self._end += len(line) + 1
            self._last = line
            return line
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def cut_torn_line(self) -> None:
        """Cut off what stands behind the last newline."""
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            self._last, self._end = last_line(self._fd)
            if os.fstat(self._fd).st_size != self._end:
                os.ftruncate(self._fd, self._end)
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def complete_lines(path: str | Path, offset: int = 0) -> Iterator[tuple[bytes, int]]:
    """Lines from `offset` on that end in a newline, each with the offset behind it."""
    with open(path, "rb") as file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            yield line[:-1], offset


def _hash_file(path: Path) -> str:
    problem = why_unreadable(path)
    if problem and os.path.exists(path):
        raise ValueError(f"{path} {problem}")
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fingerprint(what: Any) -> str:
    """SHA-256 (hex) of content: of a file, of a directory, or of an object as canonical JSON.

    A `Path` is read: a file by its bytes, a directory by the relative names, executable bits and
    bytes of all files below it. Any other value (a string too) is taken as it is, and the order
    of keys does not matter. A path that does not exist raises FileNotFoundError.

    Of a directory, what cannot be read to its end counts by its name alone: a pipe, a device, a
    link that leads nowhere, to a folder that it is in, or to a file system of the kernel's. Such a
    path itself raises ValueError.
    """
    if not isinstance(what, Path):
        return hashlib.sha256(b"object\0" + dumps(what, sort=True)).hexdigest()
    if not what.is_dir():
        return _hash_file(what)
    digest = hashlib.sha256(b"directory\0")
    for file in sorted(_files_below(what), key=lambda f: f.relative_to(what).as_posix()):
        name = file.relative_to(what).as_posix()
        mode = "x" if os.access(file, os.X_OK) else "-"
        content = "no content" if why_unreadable(file) else _hash_file(file)
        digest.update(os.fsencode(name) + f"\0{mode}\0{content}\n".encode())
    return digest.hexdigest()


def _files_below(directory: Path) -> Iterator[Path]:
    """Files below a directory, links followed, and the links to folders that are not followed."""
    for root, folders, names in os.walk(directory, followlinks=True):
        place = Path(root)
        ends = [name for name in folders if _is_end(place / name, directory)]
        folders[:] = [name for name in folders if name not in ends]
        yield from (place / name for name in (*names, *ends))


def _is_end(folder: Path, top: Path) -> bool:
    """Whether a folder below `top` is a link that leads up, or to what the kernel makes up."""
    if not folder.is_symlink():
        return False
    real = os.path.realpath(folder)
    above = [place for place in folder.parents if place.is_relative_to(top)]
    up = any(Path(os.path.realpath(place)).is_relative_to(real) for place in above)
    return up or of_kernel(folder)
