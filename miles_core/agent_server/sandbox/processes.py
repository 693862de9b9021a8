"""Ending a command with everything that descends from it, and what an agent leaves behind."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import defaultdict
from collections.abc import Iterable

from miles_core.agent_server.sandbox.errors import SandboxError

PF_EXITING = 0x4  # include/linux/sched.h
END_LIMIT_S = 3.0
"""How long the processes of a sandbox may take to end."""


def _table() -> dict[int, tuple[int, int]]:
    """The parent and the process group of every process of this host."""
    table = {}
    for pid in _all():
        _, parent, group, *_ = _stat(pid)
        table[pid] = int(parent), int(group)
    return table


def descendants(root: int) -> list[int]:
    """The processes below `root`, parents before their children."""
    children: dict[int, list[int]] = defaultdict(list)
    for pid, (parent, _) in _table().items():
        children[parent].append(pid)
    found, at = [root], 0
    while at < len(found):
        found += children.get(found[at], [])
        at += 1
    return found[1:]


def exiting(pid: int) -> bool:
    """Whether a process has ended, waited for or not, or is about to (proc(5), /proc/PID/stat)."""
    fields = _stat(pid)
    return fields[0] in "ZX" or bool(int(fields[6]) & PF_EXITING)


def end_tree(root: int, handle: int) -> None:
    """SIGKILL a process with all that descends from it; `handle` is its pidfd.

    What is left without its parent of the process group that it leads ends too. All are stopped
    first, so that none can start another while they are looked for. Raises ProcessLookupError
    when `root` is gone.
    """
    seen: set[int] = set()
    for _ in range(8):
        signal.pidfd_send_signal(handle, signal.SIGSTOP)
        group = {pid for pid, (_, leader) in _table().items() if leader == root and pid != root}
        fresh = (group | set(descendants(root))) - seen
        signal.pidfd_send_signal(handle, 0)  # it was still there, so its pid was its own
        if not fresh:
            break
        seen |= fresh
        for pid in fresh:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGSTOP)
    for pid in seen:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    signal.pidfd_send_signal(handle, signal.SIGKILL)


Member = tuple[int, str]
"""A process: its pid on this host and its start time, which no later process shares."""


def members(init: int, among: Iterable[int] | None = None) -> frozenset[Member]:
    """The processes of the pid namespace whose first one is `init`, without it and its helpers.

    Left out are zombies, and what has the session of `init`: only its own children do, for no
    process can join one. `among` are the processes that may be ones, if not all of this host.
    """
    listed = _listed(init, _all() if among is None else among)
    return frozenset(found for found, (state, _) in listed.items() if state != "Z")


def _all() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def _listed(init: int, among: Iterable[int]) -> dict[Member, tuple[str, int]]:
    """The same with their states and parents, and with zombies."""
    space, session = _namespace(init), _stat(init)[3]
    found = {}
    for pid in among:
        if space and _namespace(pid) == space:
            state, parent, _, own, *rest = _stat(pid)
            if own != session:
                found[pid, rest[15]] = state, int(parent)
    return found


def _others(init: int, spared: frozenset[Member]) -> dict[int, str]:
    """The states of the members that are not spared and descend from none that is, by pid.

    Without zombies that a process outside is to wait for: an agent that was put here has one.
    """
    listed = _listed(init, _all())
    kept = {pid for pid, _ in spared & set(listed)}
    while more := {pid for (pid, _), (_, parent) in listed.items() if parent in kept} - kept:
        kept |= more
    here = {init} | {pid for pid, _ in listed}
    return {
        pid: state
        for (pid, _), (state, parent) in listed.items()
        if pid not in kept and (state != "Z" or parent in here)
    }


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third on; those of a zombie for one that is gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return ["Z"] + ["0"] * 30


def _namespace(pid: int) -> str:
    """The pid namespace of a process; empty when it is gone or not ours to see."""
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return ""


def end_members(init: int, spared: frozenset[Member]) -> None:
    """SIGKILL the members of the namespace of `init`, and wait for their end.

    Those that are `spared`, and what descends from them, live on. Blocks for at most `END_LIMIT_S`
    seconds; raises SandboxError when some are still there, for nothing that they could touch can
    be trusted then. Zombies are waited for as well: they count against the limit of processes.
    """
    space = _namespace(init)
    limit = time.monotonic() + END_LIMIT_S
    while left := _others(init, spared):
        alive = [pid for pid, state in left.items() if state != "Z"]
        if time.monotonic() > limit:
            if not alive:
                return
            raise SandboxError(f"{len(alive)} processes of the agent could not be ended")
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                handle = os.pidfd_open(pid)
                try:
                    if _namespace(pid) == space:  # it is not another process by now
                        signal.pidfd_send_signal(handle, signal.SIGKILL)
                finally:
                    os.close(handle)
        time.sleep(0.002)
