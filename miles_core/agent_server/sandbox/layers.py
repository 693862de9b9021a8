"""Layers of overlay file systems on the host: mounting them, and keeping what a sandbox wrote.

What a sandbox wrote is the upper directory of its overlay. It is read through descriptors, one
name at a time and never through a link, so nothing in it leads to a file of the host.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

OPAQUE = "user.overlay.opaque"
_KEPT_ATTRIBUTES = ("security.capability", "system.posix_acl_access", "system.posix_acl_default")
_OVERLAY = "user.overlay."


@dataclass(frozen=True)
class Root:
    """The read-only layers of a sandbox's root, the uppermost first.

    `usr` has those of /usr where it is a mount of its own, as on the host's own system.
    """

    layers: tuple[Path, ...]
    usr: tuple[Path, ...] = ()

    def over(self, root: Path, usr: Path) -> Root:
        """These layers with one more above each of them."""
        return Root((root, *self.layers), (usr, *self.usr))

    def overlays(self, stage: str) -> list[dict[str, str]]:
        """The mounts of the root at `stage`/m, all writes below `stage` (overlayfs.rst)."""

        def overlay(work: str, lower: tuple[Path, ...], upper: str, place: str) -> dict[str, str]:
            layers = ":".join(_escaped(str(path)) for path in lower)
            data = f"userxattr,workdir={stage}/{work},lowerdir={layers},upperdir={stage}/{upper}"
            return {"place": f"{stage}/{place}", "data": data}

        made = [overlay("w", self.layers, "u", "m")]
        if self.usr:
            made.append(overlay("uw", self.usr, "uu", "m/usr"))
        return made


def _escaped(path: str) -> str:
    for mark in "\\:,":
        path = path.replace(mark, "\\" + mark)
    return path


def can_keep(directory: Path) -> bool:
    """Whether the file system of `directory` holds what an overlay marks removed names with."""
    with tempfile.TemporaryDirectory(dir=directory, prefix=".probe-") as probe:
        try:
            os.mknod(f"{probe}/whiteout", stat.S_IFCHR, os.makedev(0, 0))
            os.setxattr(probe, OPAQUE, b"y")
        except OSError:
            return False
    return True


def copy_layer(source: int, target: Path) -> None:
    """Copy an upper directory, open as `source`, to the new directory `target`; OSError.

    Removed names and opaque directories stay such. Sockets and devices are left out.
    """
    target.mkdir()
    place = os.open(target, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _Copy(place).directory(source, place, "")
    finally:
        os.close(place)


class _Copy:
    """One copy; files of several names are written once."""

    def __init__(self, top: int) -> None:
        self._top = top
        self._names: dict[tuple[int, int], str] = {}

    def directory(self, source: int, target: int, path: str) -> None:
        """Copy what is in an open directory, then what it is itself."""
        for name in os.listdir(source):
            below = f"{path}/{name}" if path else name
            status = os.stat(name, dir_fd=source, follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                os.mkdir(name, 0o700, dir_fd=target)
                with _opened(name, source) as inner, _opened(name, target) as made:
                    self.directory(inner, made, below)
            elif _copied(status):
                self._name(name, source, target, below, status)
        _attributes(source, target)
        _status(target, os.fstat(source))

    def _name(self, name: str, source: int, target: int, path: str, status: os.stat_result) -> None:
        key = (status.st_dev, status.st_ino)
        if status.st_nlink > 1 and key in self._names:
            earlier = self._names[key]
            os.link(earlier, name, src_dir_fd=self._top, dst_dir_fd=target, follow_symlinks=False)
            return
        if stat.S_ISLNK(status.st_mode):
            os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
        elif stat.S_ISREG(status.st_mode):
            self._file(name, source, target)
        else:
            os.mknod(name, status.st_mode, status.st_rdev, dir_fd=target)
        if not stat.S_ISREG(status.st_mode):
            os.chown(name, status.st_uid, status.st_gid, dir_fd=target, follow_symlinks=False)
            times = (status.st_atime_ns, status.st_mtime_ns)
            os.utime(name, ns=times, dir_fd=target, follow_symlinks=False)
        self._names[key] = path

    def _file(self, name: str, source: int, target: int) -> None:
        reading = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        writing = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        given = os.open(name, reading, dir_fd=source)
        try:
            made = os.open(name, writing, 0o600, dir_fd=target)
            try:
                _contents(given, made)
                status = os.fstat(given)
                _status(made, status)
                _attributes(given, made)
                os.utime(made, ns=(status.st_atime_ns, status.st_mtime_ns))
            finally:
                os.close(made)
        finally:
            os.close(given)


@contextlib.contextmanager
def _opened(name: str, parent: int) -> Iterator[int]:
    descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _copied(status: os.stat_result) -> bool:
    """Whether a name that is no directory is part of a layer: no sockets and no devices."""
    if stat.S_ISCHR(status.st_mode):
        return status.st_rdev == 0  # a removed name
    return not (stat.S_ISSOCK(status.st_mode) or stat.S_ISBLK(status.st_mode))


def _contents(given: int, made: int) -> None:
    """Copy the data of a file, its holes as holes."""
    size, at = os.fstat(given).st_size, 0
    os.ftruncate(made, size)
    while at < size:
        try:
            at = os.lseek(given, at, os.SEEK_DATA)
        except OSError:  # nothing but a hole is left
            return
        end = os.lseek(given, at, os.SEEK_HOLE)
        os.lseek(made, at, os.SEEK_SET)
        while at < end:
            sent = os.sendfile(made, given, at, min(end - at, 1 << 24))
            if sent == 0:
                return
            at += sent


def _status(made: int, status: os.stat_result) -> None:
    os.fchown(made, status.st_uid, status.st_gid)
    os.fchmod(made, stat.S_IMODE(status.st_mode))
    os.utime(made, ns=(status.st_atime_ns, status.st_mtime_ns))


def _attributes(given: int, made: int) -> None:
    """Extended attributes: those of programs, and of an overlay's only that it is opaque."""
    for name in os.listxattr(given):
        of_overlay = name.startswith(_OVERLAY) and not name.startswith(_OVERLAY + "overlay.")
        if of_overlay and name != OPAQUE:
            continue
        if name.startswith("user.") or name in _KEPT_ATTRIBUTES:
            os.setxattr(made, name, os.getxattr(given, name))


def size_of(directory: Path) -> int:
    """Bytes on disk of all that is in a directory."""
    total = 0
    for _, _, names, descriptor in os.fwalk(directory, follow_symlinks=False):
        total += os.fstat(descriptor).st_blocks * 512
        for name in names:
            total += os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_blocks * 512
    return total


def flush(directory: Path) -> None:
    """Have the file system of a directory written out; raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(descriptor) != 0:
            raise OSError(ctypes.get_errno(), f"syncfs: {os.strerror(ctypes.get_errno())}")
    finally:
        os.close(descriptor)


def remove(directory: Path) -> None:
    """Remove a directory with all that is in it; what cannot be removed stays for a later start."""
    shutil.rmtree(directory, ignore_errors=True)
