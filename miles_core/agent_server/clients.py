"""Programs on this host that work for a container engine, and how one is ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path

from miles_core.agent_server.sandbox import processes

END_LIMIT_S = 5.0
"""How long such a program may take to end after it was asked to."""
STEP_S = 0.05
BUILDERS = frozenset({"podman", "podman-compose", "buildah"})


async def end_client(pid: int) -> None:
    """End a program with all that descends from it; it is gone or a zombie then.

    A build of podman's cleans up when one of its steps fails, and leaves the step running and its
    working container when it gets a signal. So the step is ended first.
    """
    if _is_build(pid):
        await _end_steps(pid)
    tree = [pid, *processes.descendants(pid)]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for each in tree:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(each, number)
        await _wait(tree)


async def _end_steps(pid: int) -> None:
    """SIGKILL what a build runs in containers until the build ends."""
    limit = time.monotonic() + END_LIMIT_S
    own = os.readlink("/proc/self/ns/mnt")
    while not processes.exiting(pid) and time.monotonic() < limit:
        for step in processes.descendants(pid):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{step}/ns/mnt") != own:
                    os.kill(step, signal.SIGKILL)
        await asyncio.sleep(STEP_S)


async def _wait(pids: list[int]) -> None:
    limit = time.monotonic() + END_LIMIT_S
    while time.monotonic() < limit:
        if all(processes.exiting(pid) for pid in pids):
            break
        await asyncio.sleep(STEP_S)


def arguments(pid: int) -> list[str]:
    """The command line of a process; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return []


def _is_build(pid: int) -> bool:
    words = arguments(pid)
    builder = not BUILDERS.isdisjoint(os.path.basename(word) for word in words[:2])
    return builder and "build" in words
