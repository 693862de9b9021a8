"""The process that holds the namespaces of one sandbox (`inside/hold.py`).

A private mount namespace gets a tmpfs of the task's disk size; overlays on it make the root and
/usr writable without touching the host. bubblewrap then makes the pid, network, ipc and uts
namespaces and drops capabilities. All of it lives in a user namespace, so that nothing inside is
privileged outside. When the server dies the kernel ends the holder, and with it every process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
from pathlib import Path
from typing import Any

from miles_core.agent_server.sandbox.channel import Fork, abandon, forked
from miles_core.agent_server.sandbox.errors import SandboxError
from miles_core.agent_server.sandbox.forks import Forks, Spawner, joined
from miles_core.agent_server.sandbox.layers import Root
from miles_core.agent_server.sandbox.privileges import CAPABILITIES, FIRST_ALONE

STAGE = "/mnt"

PROC_READ_ONLY = ("/proc/sys", "/proc/sysrq-trigger", "/proc/irq", "/proc/bus", "/proc/fs")
"""Kernel settings that user 0 may write by ownership alone; bubblewrap 0.8 leaves some open."""
PROC_HIDDEN = ("/proc/kcore", "/proc/keys", "/proc/timer_list", "/proc/latency_stats")
"""What tells of all of the host, whoever reads it."""

SHARED_MEMORY_MB = 64
"""Size of /dev/shm, which is no part of a sandbox's disk; containers have as much."""
END_S = 5.0
"""How long bubblewrap may take to end after the first process of its sandbox."""
INIT = "echo ready; exec </dev/null >/dev/null 2>&1; while :; do sleep 1000000; done"
"""Process 1 of a sandbox: it reaps orphans, and no signal from inside ends it."""


class Holder:
    """Makes the namespaces of one sandbox. `pid` is their first process, once it is started."""

    def __init__(self) -> None:
        self.pid: int | None = None
        self._first: int | None = None
        """A pidfd of it: the number of one that has ended may be another's."""
        self._process: Fork | None = None

    async def start(
        self,
        helper: Forks,
        name: str,
        root: Root,
        disk_mb: int,
        binds: list[tuple[str, str]],
        cgroups: list[Path],
    ) -> Spawner:
        """Make a sandbox; what starts commands in it. Raises SandboxError with what was said."""
        channel = await helper.start()
        with contextlib.ExitStack() as stack:
            told, tells, waits, ids = [*os.pipe(), *os.pipe()]
            for descriptor in (told, tells, waits, ids):
                stack.callback(os.close, descriptor)
            host = stack.enter_context(open("/proc/self/ns/mnt", "rb")).fileno()
            given = [tells, waits, host, *joined(cgroups, stack)]
            holding = channel.fork(_order(root, disk_mb, binds), given)
            try:
                spawner = await helper.spawner(name, [told, ids, host], cgroups, new=True)
            except BaseException:
                abandon(holding)
                raise
        try:
            self._process = await forked(holding)
            self.pid = await spawner.entered()
            self._first = os.pidfd_open(self.pid)
        except ProcessLookupError as error:
            spawner.close()
            raise SandboxError("the sandbox ended while it started") from error
        except SandboxError as error:
            spawner.close()
            said = str(error).removeprefix(f"{spawner.name}: ")
            raise SandboxError(f"the sandbox did not start: {said}") from error
        except BaseException:
            spawner.close()
            raise
        return spawner

    def open_written(self) -> tuple[int, int]:
        """Descriptors of what was written to the root and to /usr; they outlive the sandbox."""
        assert self._process is not None
        stage = f"/proc/{self._process.pid}/root{STAGE}"
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
        root = os.open(f"{stage}/u", flags)
        try:
            return root, os.open(f"{stage}/uu", flags)
        except OSError:
            os.close(root)
            raise

    def kill(self) -> None:
        """End every process of the sandbox, at once, if it has a first one.

        They end with that one, for which the holder waits and then ends too.
        """
        if self._first is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._first, signal.SIGKILL)

    async def close(self) -> None:
        """End the sandbox, also one that is not up yet. Safe to call twice."""
        if self._process is None:
            return
        process, self._process = self._process, None
        if self._first is not None:
            self.kill()
            await asyncio.wait([process.ended], timeout=END_S)
            os.close(self._first)
            self._first = None
        process.end()
        await asyncio.wait([process.ended], timeout=END_S)


def _order(root: Root, disk_mb: int, binds: list[tuple[str, str]]) -> dict[str, Any]:
    """What `inside/hold.py` is to make."""
    bound = [("--ro-bind", source, target) for source, target in binds]
    bound += [("--ro-bind", path, path) for path in PROC_READ_ONLY if os.path.exists(path)]
    bound += [("--ro-bind", "/dev/null", path) for path in PROC_HIDDEN if os.path.exists(path)]
    held = (*CAPABILITIES, *FIRST_ALONE)
    capabilities = [("--cap-add", f"CAP_{name}") for name in held]
    program = shutil.which("bwrap")
    if program is None:
        raise SandboxError("there is no bwrap on the PATH")
    return {
        "stage": STAGE,
        "disk_mb": disk_mb,
        "overlays": root.overlays(STAGE),
        "removed": [f"{STAGE}/m/usr/lib/python3*/EXTERNALLY-MANAGED"] if root.usr else [],
        "program": program,
        "argv": [
            *["bwrap", "--bind", f"{STAGE}/m", "/", "--dev", "/dev", "--proc", "/proc"],
            *["--size", str(SHARED_MEMORY_MB << 20), "--perms", "1777", "--tmpfs", "/dev/shm"],
            *["--remount-ro", "/dev"],
            *[word for bind in bound for word in bind],
            *["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"],
            *["--unshare-cgroup-try", "--hostname", "sandbox", "--die-with-parent"],
            *["--new-session", "--clearenv", "--cap-drop", "ALL"],
            *[word for capability in capabilities for word in capability],
            *["--as-pid-1", "--info-fd", "2", "/bin/sh", "-c", INIT],
        ],
    }
