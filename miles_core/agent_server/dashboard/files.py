"""Reading what a sandbox left: contained in one directory, through no link, bounded in size.

An agent may have planted links, pipes and endless files in the directories that it can write.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
MOST_NAMES = 2000
"""Entries of one directory that are looked at."""


@dataclass(frozen=True)
class Text:
    """The end of a file; `size` is that of the whole file in bytes."""

    text: str
    size: int
    cut: bool


class Folder:
    """A directory that is read without leaving it."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @contextlib.contextmanager
    def _directory(self, parts: tuple[str, ...]) -> Iterator[int]:
        """A descriptor of a directory below the root; raises OSError for a link on the way."""
        descriptor = os.open(self.root, _DIRECTORY)
        try:
            for part in parts:
                if part in ("", ".", "..") or "/" in part:
                    raise OSError(f"{part!r} is no name of a directory")
                below = os.open(part, _DIRECTORY, dir_fd=descriptor)
                os.close(descriptor)
                descriptor = below
            yield descriptor
        finally:
            os.close(descriptor)

    def names(self, *parts: str) -> list[str]:
        """Sorted names in a directory; none when there is no such directory."""
        try:
            with self._directory(parts) as descriptor, os.scandir(descriptor) as entries:
                return sorted(
                    entry.name for entry, _ in zip(entries, range(MOST_NAMES), strict=False)
                )
        except OSError:
            return []

    def read(self, *parts: str, limit: int, whole: bool = False) -> bytes | None:
        """The last `limit` bytes of a regular file, or None when there is none to be read.

        With `whole`, a file that is larger than the limit is None as well.
        """
        found = self._read(parts, limit)
        if found is None or (whole and found[1] > limit):
            return None
        return found[0]

    def tail(self, *parts: str, limit: int) -> Text | None:
        """The end of a text file in at most `limit` bytes, from the start of a line."""
        found = self._read(parts, limit)
        if found is None:
            return None
        data, size = found
        cut = size > len(data)
        if cut:
            data = data.partition(b"\n")[2] or data
        return Text(data.decode(errors="replace"), size, cut)

    def stamp(self, *parts: str) -> tuple[int, int] | None:
        """Size in bytes and time of change in nanoseconds of a regular file."""
        try:
            with self._directory(parts[:-1]) as descriptor:
                found = os.stat(parts[-1], dir_fd=descriptor, follow_symlinks=False)
        except OSError:
            return None
        return (found.st_size, found.st_mtime_ns) if stat.S_ISREG(found.st_mode) else None

    def _read(self, parts: tuple[str, ...], limit: int) -> tuple[bytes, int] | None:
        try:
            with self._directory(parts[:-1]) as directory:
                descriptor = os.open(parts[-1], _FILE, dir_fd=directory)
        except OSError:
            return None
        with os.fdopen(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                return None
            file.seek(max(0, found.st_size - limit))
            return file.read(limit), found.st_size
