"""What is done with files in a sandbox without starting a program of it.

Archives are tar streams. They are read from standard input and written to standard output.
"""

from __future__ import annotations

import contextlib
import io
import os
import stat
import sys
import tarfile
from typing import IO, Any

CHUNK = 1 << 16
_FORM: dict[str, Any] = {"encoding": "utf-8", "errors": "surrogateescape"}


def work(order: dict[str, Any]) -> int:
    """Do one of `{"make": [folder]}`, `{"is_folder": path}`, `{"unpack": folder}`,
    `{"read": path, "size": bytes}` and
    `{"pack": folder, "ends": {name: bytes}, "limits": [bytes, names, depth]}`; the exit status, 0
    for yes and done."""
    try:
        if "is_folder" in order:
            return 0 if os.path.isdir(order["is_folder"]) else 1
        for folder in order.get("make", []):
            os.makedirs(folder, exist_ok=True)
        if "unpack" in order:
            unpack(sys.stdin.buffer, order["unpack"])
        if "read" in order:
            read(sys.stdout.buffer, order["read"], order["size"])
        if "pack" in order:
            pack(sys.stdout.buffer, order["pack"], order["ends"], *order["limits"])
    except OSError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def read(out: IO[bytes], path: str, size: int) -> None:
    """Write what is in a file, and one byte beyond `size` at the most."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        left = size + 1
        while left and (chunk := file.read(min(left, CHUNK))):
            out.write(chunk)
            left -= len(chunk)


def pack(
    out: IO[bytes], folder: str, ends: dict[str, int], size: int, names: int, depth: int
) -> None:
    """Write the folders and files of a folder as an archive, and nothing of another kind.

    Of a file directly in it that `ends` names, the last bytes are written. A file of several names
    is written for each. What vanishes meanwhile is left out. Raises OSError for what has more than
    `size` bytes, `names`, or folders in each other.
    """
    with tarfile.open(fileobj=out, mode="w|", **_FORM) as made:
        made.addfile(_info(".", os.stat(folder)))
        folders = [("", folder)]
        while folders:
            above, path = folders.pop()
            if above.count("/") > depth:
                raise OSError(f"{folder} is more than {depth} folders deep")
            found = os.listdir(path)
            names -= len(found)
            if names < 0:
                raise OSError(f"{folder} has too many files")
            for name in sorted(found):
                below, whole = f"{above}{name}", os.path.join(path, name)
                with contextlib.suppress(FileNotFoundError):
                    if _add(made, whole, below, ends.get(below), size - made.offset):
                        folders.append((f"{below}/", whole))


def _info(name: str, status: os.stat_result) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = tarfile.DIRTYPE if stat.S_ISDIR(status.st_mode) else tarfile.REGTYPE
    info.mode = stat.S_IMODE(status.st_mode)
    info.mtime = status.st_mtime
    return info


def _add(made: tarfile.TarFile, path: str, name: str, last: int | None, most: int) -> bool:
    """Add one name; whether it is a folder. Raises OSError for a file of more than `most` bytes."""
    status = os.lstat(path)
    if stat.S_ISDIR(status.st_mode):
        made.addfile(_info(name, status))
        return True
    if stat.S_ISREG(status.st_mode):
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        with open(os.open(path, flags), "rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            info = _info(name, status)
            info.size = status.st_size
            if last is not None and info.size > last:
                file.seek(info.size - last)
                info.size = last
            if info.size > most:
                raise OSError(f"{name} is too large, with what comes before it")
            made.addfile(info, _Exactly(file))
    return False


class _Exactly(io.RawIOBase):
    """A file of which as many bytes can be read as it had, though it became shorter."""

    def __init__(self, file: io.FileIO) -> None:
        self._file = file

    def read(self, size: int = -1) -> bytes:
        data = b""
        while len(data) < size and (more := self._file.read(size - len(data))):
            data += more
        return data.ljust(size, b"\0")


def unpack(given: IO[bytes], folder: str) -> None:
    """Write what is in an archive to a folder, as this process's own.

    A name that is there already is replaced and never followed, unless it is a folder here and
    there, which is then left as it is.
    """
    os.makedirs(folder, exist_ok=True)
    with tarfile.open(fileobj=given, mode="r|", **_FORM) as read:
        for info in read:
            path = os.path.normpath(os.path.join(folder, info.name))
            if info.isdir():
                _make_folder(path, info.mode)
                continue
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            if info.isreg():
                _write(read, info, path)
            elif info.issym():
                os.symlink(info.linkname, path)
            elif info.islnk():
                os.link(os.path.join(folder, info.linkname), path, follow_symlinks=False)
            elif info.isfifo():
                os.mkfifo(path, info.mode)
            else:
                raise OSError(f"{info.name} is a device")


def _make_folder(path: str, mode: int) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        return
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    os.mkdir(path)
    os.chmod(path, mode & 0o7777)


def _write(read: tarfile.TarFile, info: tarfile.TarInfo, path: str) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    data = read.extractfile(info)
    assert data is not None
    with open(os.open(path, flags, 0o600), "wb") as file:
        while chunk := data.read(CHUNK):
            file.write(chunk)
        file.flush()
        os.fchmod(file.fileno(), info.mode & 0o7777)
        os.utime(file.fileno(), (info.mtime, info.mtime))


def load() -> None:
    """Use everything once, so that nothing is left to be imported in a sandbox."""
    for name in ("a", "\udcff" * 101):
        info = tarfile.TarInfo(name)
        info.mtime = 0.5
        data = io.BytesIO()
        with tarfile.open(fileobj=data, mode="w|", **_FORM) as made:
            made.addfile(info)
        data.seek(0)
        with tarfile.open(fileobj=data, mode="r|", **_FORM) as read:
            for found in read:
                assert found.name == name
