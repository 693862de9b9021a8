"""Folders that the verifier has to itself, in a mount namespace of its own.

A mount keeps nobody from moving or removing the folder under it in another mount namespace, and is
gone with the folder (namei.c of the kernel, detach_mounts). So where processes of the agent's are
left, the verifier gets a root directory of its own, in which the entries of the old one are bound:
what its folders are mounted on is then in a file system that no one else has. Beside a file that is
not to be shared, small files are copies: over what is bound there nothing could be renamed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat

from system_calls import (
    CLONE_NEWNS,
    MS_BIND,
    MS_NODEV,
    MS_NOSUID,
    MS_PRIVATE,
    MS_REC,
    checked,
    libc,
)

COPIED = "etc"
"""The folder of which small files are copied."""
COPY_LIMIT = 1 << 20
"""Bytes of a file that is copied."""


def set_apart(
    places: dict[str, int], size_mb: int, restored: list[str], files: dict[str, str]
) -> None:
    """Mount an empty folder, of a given mode, at each place; for this process and its children.

    Each of `restored` is made a folder for everybody first, if it is not one, and each of `files`
    gets its text, or is removed where that is empty; for all to see, unless what is left could
    undo it.
    """
    own_root = _is_anything_left()
    checked(libc.unshare(CLONE_NEWNS), "unshare")
    checked(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None), "mount")
    if own_root:
        _change_root({*places, *files}, size_mb)
    for path, text in files.items():
        _put_back(path, text.encode("utf-8", "surrogateescape"))
    for place in restored:
        _restore(place)
    for place, mode in places.items():
        os.makedirs(place, exist_ok=True)
        _mount_empty(place, size_mb, mode)


def _restore(place: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISDIR(os.lstat(place).st_mode):
            return
        os.unlink(place)
    os.mkdir(place)
    os.chmod(place, 0o777)


def _put_back(path: str, data: bytes) -> None:
    """A folder at its place, or none for it, is left as it is: nobody can read a file there."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        if data:
            with open(path, "xb") as file:
                file.write(data)


def _is_anything_left() -> bool:
    """Whether the sandbox has a process but its first one, that one's own children and this one.

    Those share the session of the first, which no other can join (setsid(2)). Zombies count not.
    """
    session = _stat("1")[3]
    others = {name for name in os.listdir("/proc") if name.isdigit()} - {"1", str(os.getpid())}
    return any(state != "Z" and own != session for state, _, _, own in map(_stat, others))


def _stat(pid: str) -> tuple[str, ...]:
    """State, parent, process group and session (proc(5)); a zombie's for one that is gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return tuple(file.read().rpartition(")")[2].split()[:4])
    except OSError:
        return ("Z", "0", "0", "0")


def _mount_empty(place: str, size_mb: int, mode: int) -> None:
    flags = ctypes.c_ulong(MS_NOSUID | MS_NODEV)
    options = f"size={size_mb}m,mode={mode:o}".encode()
    checked(libc.mount(b"apart", place.encode(), b"tmpfs", flags, options), f"mount {place}")


def _change_root(apart: set[str], size_mb: int) -> None:
    """Mount a root over the old one, with what that has except at `apart`, and enter it."""
    old = os.open("/", os.O_PATH | os.O_DIRECTORY)
    oneself = os.pidfd_open(os.getpid())
    try:
        _mount_empty("/", size_mb, 0o755)
        os.setns(oneself, CLONE_NEWNS)  # the root and the working directory are the new ones now
        os.fchdir(old)
        _bind_entries("", apart)
        os.chdir("/")
    finally:
        os.close(oneself)
        os.close(old)


def _bind_entries(below: str, apart: set[str]) -> None:
    """Show what is in the folder `below` of the old root, which is the working directory."""
    for name in os.listdir(below or "."):
        path = f"{below}/{name}" if below else name
        if f"/{path}" in apart:
            continue
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # it may change meanwhile
            kind = os.lstat(path).st_mode
            if any(place.startswith(f"/{path}/") for place in apart):
                os.mkdir(f"/{path}")
                if stat.S_ISDIR(kind):
                    _bind_entries(path, apart)
            elif stat.S_ISLNK(kind):
                os.symlink(os.readlink(path), f"/{path}")
            elif not (below == COPIED and stat.S_ISREG(kind) and _copy(path)):
                _bind(path, stat.S_ISDIR(kind))


def _copy(path: str) -> bool:
    """Copy a file that is small; whether it is one."""
    given = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(given, "rb") as source:
        status = os.fstat(given)
        if not stat.S_ISREG(status.st_mode) or status.st_size > COPY_LIMIT:
            return False
        with open(f"/{path}", "xb") as made:
            made.write(source.read(COPY_LIMIT))
            os.fchown(made.fileno(), status.st_uid, status.st_gid)
            os.fchmod(made.fileno(), stat.S_IMODE(status.st_mode))
    return True


def _bind(path: str, is_directory: bool) -> None:
    if is_directory:
        os.mkdir(f"/{path}")
    else:
        os.close(os.open(f"/{path}", os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    source, target = path.encode("utf-8", "surrogateescape"), f"/{path}"
    flags = ctypes.c_ulong(MS_BIND | MS_REC)
    result = libc.mount(source, target.encode("utf-8", "surrogateescape"), None, flags, None)
    checked(result, f"bind {path}")
