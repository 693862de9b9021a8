"""Ending a command together with everything that descends from it."""

from __future__ import annotations

import contextlib
import os
import signal
from collections import defaultdict
from pathlib import Path


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
