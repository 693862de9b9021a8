"""Whose datagram it was: a command that is being run, or something that was left running."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from miles_core.agent_server.sandbox.processes import descendants

TABLES = ("udp", "udp6")


def asked_by(roots: Iterable[int], space: int, port: int) -> bool:
    """Whether one of `roots` or a descendant has the UDP socket of a local `port`.

    `space` is a process of the network namespace (its tables: proc(5), /proc/net/udp). A process
    that waits for the answer to its datagram still has the socket.
    """
    wanted = {f"socket:[{inode}]" for inode in _inodes(space, port)}
    return bool(wanted) and any(
        wanted & set(_files(pid)) for root in roots for pid in (root, *descendants(root))
    )


def _inodes(space: int, port: int) -> list[str]:
    found = []
    for table in TABLES:
        try:
            lines = Path(f"/proc/{space}/net/{table}").read_text().splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            if int(fields[1].rpartition(":")[2], 16) == port:
                found.append(fields[9])
    return found


def _files(pid: int) -> list[str]:
    """What the descriptors of a process lead to; nothing for one that is gone."""
    folder = f"/proc/{pid}/fd"
    try:
        return [os.readlink(f"{folder}/{name}") for name in os.listdir(folder)]
    except OSError:
        return []
