"""Files that can be read to their end: no pipe, no device, nothing that the kernel makes up."""

from __future__ import annotations

import os
import stat
from pathlib import Path

KERNEL = ("/proc", "/sys")
"""Where a regular file may block its reader or say something else each time."""

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def of_kernel(path: str | Path) -> bool:
    """Whether a path, its links followed, is in a file system that the kernel makes up."""
    real = os.path.realpath(path)
    return any(real == place or real.startswith(f"{place}/") for place in KERNEL)


def why_unreadable(path: str | Path, limit_bytes: int | None = None) -> str | None:
    """Why a path, its links followed, is no regular file of at most `limit_bytes`; None for one.

    The words follow the name of the file. A file that is not there is one of the reasons.
    """
    try:
        status = os.stat(path)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    kind = stat.S_IFMT(status.st_mode)
    if kind != stat.S_IFREG:
        return f"is {_KINDS.get(kind, 'something else')}, and no regular file"
    if of_kernel(path):
        return f"leads to {os.path.realpath(path)}, and is no regular file"
    if limit_bytes is not None and status.st_size > limit_bytes:
        return f"has {status.st_size} bytes, and may have {limit_bytes}"
    return None
