"""Ending a command with everything that descends from it, and what an agent leaves behind."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import defaultdict
from pathlib import Path

from miles_core.agent_server.sandbox.errors import SandboxError

PF_EXITING = 0x4  # include/linux/sched.h
END_LIMIT_S = 3.0
"""How long the processes of a sandbox may take to end."""


def _children() -> dict[int, list[int]]:
    """The children of every process of this host."""
    children: dict[int, list[int]] = defaultdict(list)
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            stat = Path(f"/proc/{entry}/stat").read_text()
        except OSError:
            continue
        children[int(stat.rpartition(")")[2].split()[1])].append(int(entry))
    return children


def descendants(root: int) -> list[int]:
    """The processes below `root`, parents before their children."""
    children = _children()
    found, at = [root], 0
    while at < len(found):
        found += children.get(found[at], [])
        at += 1
    return found[1:]


def exiting(pid: int) -> bool:
    """Whether a process has ended, waited for or not, or is about to (proc(5), /proc/PID/stat)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return True
    return fields[0] in "ZX" or bool(int(fields[6]) & PF_EXITING)


def end_tree(root: int) -> None:
    """SIGKILL a child process of ours that was not waited for yet, and its descendants.

    Parents are stopped first, so that none can start another child while the tree is read. The
    process group of the root is ended as well, for a child that lost its parent.
    """
    try:
        os.kill(root, signal.SIGSTOP)
    except ProcessLookupError:
        return
    seen: set[int] = set()
    for _ in range(8):
        fresh = [pid for pid in descendants(root) if pid not in seen]
        if not fresh:
            break
        seen.update(fresh)
        for pid in fresh:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGSTOP)
    for pid in [*seen, root]:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(root, signal.SIGKILL)


def members(init: int) -> frozenset[tuple[int, str]]:
    """The processes of the pid namespace whose first one is `init`, without it and its helpers.

    Each is (pid on this host, start time), which no later process shares. Zombies are left out,
    and what has the session of `init`: only its own children do, for no process can join one.
    """
    space, session = _namespace(init), _session(init)
    found = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit() and space and _namespace(int(entry)) == space:
            state, _, _, own, *rest = _stat(int(entry))
            if own != session and state != "Z":
                found.add((int(entry), rest[15]))
    return frozenset(found)


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third on; those of a zombie for one that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["Z"] + ["0"] * 30


def _session(pid: int) -> str:
    return _stat(pid)[3]


def _namespace(pid: int) -> str:
    """The pid namespace of a process; empty when it is gone or not ours to see."""
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return ""


def end_members(init: int, spared: frozenset[tuple[int, str]]) -> None:
    """SIGKILL all members of the namespace of `init` but those `spared`, and wait for their end.

    Blocks for at most `END_LIMIT_S` seconds; raises SandboxError when some are still there, for
    nothing that they could touch can be trusted then.
    """
    space = _namespace(init)
    limit = time.monotonic() + END_LIMIT_S
    while alive := members(init) - spared:
        if time.monotonic() > limit:
            raise SandboxError(f"{len(alive)} processes of the agent could not be ended")
        for pid, _ in alive:
            with contextlib.suppress(ProcessLookupError):
                handle = os.pidfd_open(pid)
                try:
                    if _namespace(pid) == space:  # it is not another process by now
                        signal.pidfd_send_signal(handle, signal.SIGKILL)
                finally:
                    os.close(handle)
        time.sleep(0.002)
