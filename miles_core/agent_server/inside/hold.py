"""The start of a sandbox: its files, then bubblewrap, which makes the other namespaces and stays.

A holder is a fork of a helper of its own. It has a user and a mount namespace, which nothing inside
is privileged outside of. A spawner gives it its ids, since only a process of the parent namespace
may, and learns from it which process is the first one of the sandbox.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import json
import os
from typing import Any

from system_calls import CLONE_NEWNS, CLONE_NEWUSER, MS_PRIVATE, MS_REC, checked, libc

IDS = "0 0 65536"
"""user_namespaces(7): all of the first ids are inside what they are outside."""
READY = b"ready\n"
CHUNK = 4096


def hold(order: dict[str, Any], given: list[int]) -> int:
    """Make the file system of a sandbox and become bubblewrap; returns only when that fails.

    The descriptors: where to tell, where to wait for ids, the mount namespace of this host, the
    `cgroup.procs` files to join. The order: `stage`, a folder to mount at, `disk_mb`, `overlays`
    (`data` of mount(2) and `place`), `removed` (patterns of names), `program` and
    `argv`.
    """
    told, ids, mounts, *cgroups = given
    os.setsid()
    os.dup2(told, 1)
    os.dup2(told, 2)
    for cgroup in cgroups:
        os.write(cgroup, b"0")
    os.setns(mounts, CLONE_NEWNS)
    checked(libc.unshare(CLONE_NEWUSER | CLONE_NEWNS), "no user namespace: unshare")
    os.write(told, b"%d\n" % os.getpid())
    if not os.read(ids, 1):
        raise OSError("the user namespace got no ids")
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    _make_files(order["stage"], order["disk_mb"], order["overlays"], order["removed"])
    os.execve(order["program"], order["argv"], {})


def _make_files(
    stage: str, disk_mb: int, overlays: list[dict[str, str]], removed: list[str]
) -> None:
    _mount("none", "/", None, MS_REC | MS_PRIVATE, None)
    _mount("sandbox", stage, "tmpfs", 0, f"size={disk_mb}m,mode=755")
    for name in ("u", "w", "m", "uu", "uw"):
        os.mkdir(f"{stage}/{name}")
    for overlay in overlays:
        _mount("overlay", overlay["place"], "overlay", 0, overlay["data"])
    for pattern in removed:
        for path in glob.glob(pattern):
            with contextlib.suppress(OSError):
                os.unlink(path)


def _mount(source: str, place: str, kind: str | None, flags: int, data: str | None) -> None:
    words = [None if word is None else os.fsencode(word) for word in (source, place, kind, data)]
    result = libc.mount(*words[:3], ctypes.c_ulong(flags), words[3])
    checked(result, f"mount of {kind or 'nothing'} at {place}")


def _problem(said: str) -> str:
    """Why there is no sandbox, of what its start has said: the number of the holder's process,
    what bubblewrap tells of the first process, which no longer has a place for an error then."""
    if "{" in said:
        return "its /bin/sh was not started: is it there, with its libraries?"
    lines = [line for line in said.strip().splitlines() if not line.isdigit()]
    return lines[-1][-400:] if lines else "it ended without a word"


def await_first(told: int, ids: int) -> int:
    """Give a holder its ids; the first process of its sandbox, once that is up. Raises OSError."""
    said = b""
    given = False
    while not said.endswith(READY):
        data = os.read(told, CHUNK)
        if not data:
            raise OSError(_problem(said.decode(errors="replace")))
        said += data
        pid, ended, _ = said.partition(b"\n")
        if ended and pid.isdigit() and not given:
            for name in ("uid_map", "gid_map"):
                with open(f"/proc/{int(pid)}/{name}", "w") as file:
                    file.write(IDS)
            os.write(ids, b"1")
            given = True
    return int(json.loads(said[said.index(b"{") : said.index(b"}") + 1])["child-pid"])
