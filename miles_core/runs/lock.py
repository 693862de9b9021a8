"""One supervisor for a run: a lock that the kernel drops when its owner is gone."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

from miles_core.errors import UserError

_LOCK_NAME = "supervisor.lock"
_PATIENCE_S = 2.0  # a look by `holder` keeps the lock for an instant


@dataclass(frozen=True)
class Holder:
    """Who drives a run."""

    pid: int
    host: str
    started: float
    what: str


class RunLocked(UserError):
    """Another process drives the run."""

    def __init__(self, path: Path, holder: Holder) -> None:
        self.holder = holder
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.started))
        super().__init__(
            f"{path} is driven by {holder.what} (process {holder.pid} on {holder.host}, "
            f"since {since})",
            f"Watch it with `miles status {path} --watch`, or end it with `miles stop {path}`.",
        )


def _lock_path(run_dir: object) -> Path:
    return Path(getattr(run_dir, "path", run_dir)) / _LOCK_NAME  # type: ignore[arg-type]


def _identity(fd: int) -> Holder:
    try:
        return Holder(**orjson.loads(os.pread(fd, 4096, 0)))
    except (orjson.JSONDecodeError, TypeError):
        return Holder(pid=0, host="unknown", started=time.time(), what="a starting supervisor")


def holder(run_dir: object) -> Holder | None:
    """Who holds the lock of a run (`RunDir` or path), or None."""
    try:
        fd = os.open(_lock_path(run_dir), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _identity(fd)
    else:
        return None
    finally:
        os.close(fd)


@contextmanager
def run_lock(run_dir: object, what: str = "miles train") -> Iterator[Holder]:
    """Hold the lock of a run; raises `RunLocked` when another process has it.

    The lock belongs to this process alone (children do not inherit it) and ends with it, however
    it ends.
    """
    path = _lock_path(run_dir)
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise RunLocked(path.parent, _identity(fd)) from None
                time.sleep(0.05)
        me = Holder(os.getpid(), socket.gethostname(), time.time(), what)
        os.ftruncate(fd, 0)
        os.pwrite(fd, orjson.dumps(asdict(me)), 0)
        yield me
    finally:
        os.close(fd)
