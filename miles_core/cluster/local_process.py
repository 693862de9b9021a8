"""Processes by identity: id and start time, descendants, and an end that is sure (Linux)."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.05
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Process:
    """A process that cannot be mistaken for a later one with the same id.

    `started` is its start in clock ticks since boot, from `/proc/<pid>/stat`.
    """

    pid: int
    started: int

    @property
    def alive(self) -> bool:
        """Whether it still runs; a zombie does not."""
        stat = _stat(self.pid)
        return stat is not None and stat.started == self.started and stat.state not in "ZX"

    def send(self, signum: int) -> None:
        """Send a signal, unless it has ended."""
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        try:
            if self.alive:
                signal.pidfd_send_signal(handle, signum)
        except ProcessLookupError:
            pass
        finally:
            os.close(handle)


@dataclass(frozen=True)
class _Stat:
    parent: int
    state: str
    started: int


def _stat(pid: int) -> _Stat | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return _Stat(parent=int(fields[1]), state=fields[0], started=int(fields[19]))


def process(pid: int) -> Process | None:
    """The process that has this id now."""
    stat = _stat(pid)
    return None if stat is None else Process(pid, stat.started)


def this_process() -> Process:
    """The calling process."""
    me = process(os.getpid())
    if me is None:
        raise OSError("/proc is not mounted; Miles Flow needs it to supervise processes")
    return me


def _all_stats() -> dict[int, _Stat]:
    stats = ((int(name), _stat(int(name))) for name in os.listdir("/proc") if name.isdigit())
    return {pid: stat for pid, stat in stats if stat is not None}


def descendants(root: int) -> list[Process]:
    """Live processes below `root`, however deep; zombies are left out."""
    stats = _all_stats()
    found: set[int] = {root}
    grew = True
    while grew:
        new = {pid for pid, s in stats.items() if s.parent in found} - found
        found |= new
        grew = bool(new)
    return [
        Process(pid, stats[pid].started)
        for pid in found - {root}
        if pid in stats and stats[pid].state not in "ZX"
    ]


def marked(variable: str, value: str) -> list[Process]:
    """Live processes of this user that were started with `variable=value` in their environment."""
    needle = f"{variable}={value}".encode()
    found = []
    for pid, stat in _all_stats().items():
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:  # ended, or another user's
            continue
        if needle in environment.split(b"\0") and stat.state not in "ZX":
            found.append(Process(pid, stat.started))
    return found


def end(processes: Iterable[Process], grace_s: float) -> None:
    """SIGTERM, wait up to `grace_s` seconds, SIGKILL what is left."""
    processes = list(processes)
    for one in processes:
        one.send(signal.SIGTERM)
    if not wait_gone(processes, grace_s):
        for one in processes:
            one.send(signal.SIGKILL)
        wait_gone(processes, 5.0)


def wait_gone(processes: Iterable[Process], timeout_s: float) -> bool:
    """Wait until all have ended; False when some have not after `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    remaining = list(processes)
    while remaining := [p for p in remaining if p.alive]:
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def become_subreaper() -> None:
    """Make orphaned descendants children of this process, so that `descendants` finds them."""
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def reap(but: Iterable[subprocess.Popen[bytes]] = ()) -> None:
    """Collect ended children, orphans included; those of `but` through their handles."""
    handles = {p.pid: p for p in but}
    for pid, stat in _all_stats().items():
        if stat.parent != os.getpid() or stat.state != "Z":
            continue
        if pid in handles:
            handles[pid].poll()
            continue
        try:
            os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:  # a thread of this process was faster
            continue


def die_with_parent(signum: int = signal.SIGKILL) -> Callable[[], None]:
    """A `preexec_fn`: the child gets `signum` when the thread that starts it is gone."""
    parent = os.getpid()

    def in_child() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return in_child
