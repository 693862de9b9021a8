"""One sandbox: the process that holds its namespaces, and commands that are run in them.

A private mount namespace gets a tmpfs of the task's disk size; overlays on it make the root and
/usr writable without touching the host. bubblewrap then makes the pid, network, ipc and uts
namespaces and drops capabilities. All of it lives in a user namespace, so that nothing inside is
privileged outside. When the server dies the kernel ends the holder, and with it every process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miles_core.agent_server.sandbox import cgroups, processes
from miles_core.agent_server.sandbox.accounts import ROOT, Account
from miles_core.agent_server.sandbox.askers import asked_by
from miles_core.agent_server.sandbox.errors import SandboxError, SandboxGone
from miles_core.agent_server.sandbox.forks import Forks, Helpers
from miles_core.agent_server.sandbox.layers import Root
from miles_core.agent_server.sandbox.lookups import ADDRESSES, Lookups
from miles_core.agent_server.sandbox.relay import Relay, listen_inside, socket_inside
from miles_core.agent_server.sandbox.streams import OUTPUT_LIMIT, Completed, pipes

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
STAGE = "/mnt"
SECLUDE_LIMIT_S = 30.0

CAPABILITIES = {
    "CHOWN": 0,
    "DAC_OVERRIDE": 1,
    "FOWNER": 3,
    "FSETID": 4,
    "KILL": 5,
    "SETGID": 6,
    "SETUID": 7,
    "NET_BIND_SERVICE": 10,
    "SYS_CHROOT": 18,
    "SETFCAP": 31,
}
"""What root of a sandbox may do inside it, with the kernel's numbers (linux/capability.h)."""

BLOCK_SUSPEND = 36
"""A capability that means nothing in a user namespace; it sets later processes above earlier."""

PROC_READ_ONLY = ("/proc/sys", "/proc/sysrq-trigger", "/proc/irq", "/proc/bus", "/proc/fs")
"""Kernel settings that user 0 may write by ownership alone; bubblewrap 0.8 leaves some open."""


HOLDER_END_S = 5.0
"""How long bubblewrap may take to end after the first process of its sandbox."""
INIT = "echo ready; while :; do sleep 1000000; done"
"""Process 1 of a sandbox: it reaps orphans, and no signal from inside ends it."""


@dataclass
class BoxSettings:
    """What a sandbox is made of."""

    root: Root
    disk_mb: int
    limits: cgroups.Limits
    binds: list[tuple[str, str]] = field(default_factory=list)
    relays: list[tuple[int, str, int]] = field(default_factory=list)
    """(port inside, host, port outside)"""
    on_name: Callable[[str, bool], None] = lambda name, by_command: None
    """Told each public name that a program in the sandbox looks up, and whether the program
    belongs to a command that is being run; else it was left behind by an earlier one."""


class Box:
    """A running sandbox. `start` makes it, `run` runs commands in it, `close` ends all of it."""

    def __init__(
        self, name: str, settings: BoxSettings, tree: cgroups.CgroupTree, helpers: Helpers
    ) -> None:
        self.name = name
        self.settings = settings
        self._helpers = helpers
        self._tree = tree
        self._cgroups: list[Path] = []
        self._holder: asyncio.subprocess.Process | None = None
        self._pid: int | None = None
        self._relays: list[Relay] = []
        self._lookups: Lookups | None = None
        self._running: set[int] = set()
        self._mounts: int | None = None
        """The mount namespace of further commands, when it is not that of the first process."""
        self._closed = False
        self.disk_used: int | None = None
        """Bytes in the writable layers, once it is closed."""
        self.memory_peak: int | None = None
        """Most bytes of memory at once, once it is closed; None where no cgroup tells."""

    async def start(self) -> None:
        """Make the namespaces; raises SandboxError with what the tools said."""
        self._cgroups = self._tree.make(self.name, self.settings.limits)
        holder = await asyncio.create_subprocess_exec(
            *["unshare", "--user", "--mount", "--propagation", "private"],
            *["sh", "-c", self._holder_script()],
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        self._holder = holder
        assert holder.stdin and holder.stdout and holder.stderr
        await self._map_ids(holder.pid)
        holder.stdin.write(b"go\n")
        line = await holder.stdout.readline()
        if line.strip() != b"ready":
            message = (await holder.stderr.read()).decode(errors="replace").strip()
            raise SandboxError(f"the sandbox did not start: {message[-400:] or 'no message'}")
        report = b""
        while b"}" not in report:
            chunk = await holder.stderr.read(4096)
            if not chunk:
                raise SandboxError("bubblewrap ended while the sandbox started")
            report += chunk
        self._pid = int(
            json.loads(report[report.index(b"{") : report.index(b"}") + 1])["child-pid"]
        )
        for inside, host, port in self.settings.relays:
            relay = Relay(listen_inside(self._pid, inside), host, port)
            self._relays.append(relay)
            await relay.start()
        if os.geteuid() == 0:  # only root may enter a sandbox's network
            await self._answer_lookups(self._pid)

    async def _answer_lookups(self, pid: int) -> None:
        lookups = self._lookups = Lookups(self._looked_up)
        try:
            names = socket_inside(pid, socket.SOCK_DGRAM, ADDRESSES[0])
        except SandboxError:  # a kernel without IPv6
            names = socket_inside(pid, socket.SOCK_DGRAM, ADDRESSES[1])
        loop = asyncio.get_running_loop()
        await loop.create_datagram_endpoint(lambda: lookups, sock=names)

    def _looked_up(self, name: str, port: int) -> None:
        if self._pid is not None:
            self.settings.on_name(name, asked_by(self._running, self._pid, port))

    async def _map_ids(self, pid: int) -> None:
        """Give the new user namespace its ids: all of the first 65536 for root, else one's own."""
        own = os.readlink("/proc/self/ns/user")
        for _ in range(2000):
            try:
                if os.readlink(f"/proc/{pid}/ns/user") != own:
                    break
            except OSError as error:
                raise SandboxError("unshare ended: are user namespaces allowed here?") from error
            await asyncio.sleep(0.001)
        else:
            raise SandboxError("unshare made no user namespace: are they allowed on this host?")
        uid, gid = os.geteuid(), os.getegid()
        span = 65536 if uid == 0 else 1
        try:
            if uid != 0:
                Path(f"/proc/{pid}/setgroups").write_text("deny")
            Path(f"/proc/{pid}/uid_map").write_text(f"0 {uid} {span}")
            Path(f"/proc/{pid}/gid_map").write_text(f"0 {gid} {span}")
        except OSError as error:
            raise SandboxError(f"the user namespace got no ids: {error}") from error

    def _holder_script(self) -> str:
        settings = self.settings
        binds = [("--ro-bind", source, target) for source, target in settings.binds]
        binds += [("--ro-bind", path, path) for path in PROC_READ_ONLY if os.path.exists(path)]
        capabilities = [("--cap-add", f"CAP_{name}") for name in CAPABILITIES]
        bwrap = [
            *["bwrap", "--bind", f"{STAGE}/m", "/", "--dev", "/dev", "--proc", "/proc"],
            *[word for bind in binds for word in bind],
            *["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"],
            *["--unshare-cgroup-try", "--hostname", "sandbox", "--die-with-parent"],
            *["--new-session", "--clearenv", "--cap-drop", "ALL"],
            *[word for capability in capabilities for word in capability],
            *["--as-pid-1", "--info-fd", "2", "/bin/sh", "-c", INIT],
        ]
        return f"""set -e
read go
{self._join_script()}
mount -t tmpfs -o size={settings.disk_mb}m,mode=755 sandbox {STAGE}
{settings.root.mount_script(STAGE)}
exec {shlex.join(bwrap)}
"""

    def _join_script(self) -> str:
        return "".join(f"echo $$ > {directory}/cgroup.procs; " for directory in self._cgroups)

    @property
    def pid(self) -> int | None:
        """The first process of the sandbox, as this host knows it; None where there is none."""
        return self._pid if self.alive else None

    @property
    def alive(self) -> bool:
        """Whether commands can be run."""
        return self._pid is not None and not self._closed and not processes.exiting(self._pid)

    def _measure(self) -> None:
        """Note the space that was used, while the sandbox is there."""
        self.memory_peak = cgroups.memory_peak(self._cgroups)
        with contextlib.suppress(OSError):  # it ended by itself
            # An overlay's numbers are those of its upper layer, a tmpfs of this sandbox alone.
            disk = os.statvfs(f"/proc/{self._pid}/root")
            self.disk_used = (disk.f_blocks - disk.f_bfree) * disk.f_frsize

    async def run(
        self,
        argv: list[str],
        *,
        env: dict[str, str] | None = None,
        cwd: str = "/",
        user: Account = ROOT,
        stdin: bytes | None = None,
        timeout_s: float | None = None,
        limit: int = OUTPUT_LIMIT,
    ) -> Completed:
        """Run a command and wait for it.

        When the time is up, or this call is cancelled, the command ends with all its descendants.
        A process that it had put into the background before, as a child of init, lives on.
        """
        order = {"argv": argv, "process": self._process(user, env or {}, cwd)}
        try:
            async with asyncio.timeout(timeout_s):
                return await self._fork(self._helpers.commands, order, stdin, limit)
        except TimeoutError:
            return Completed(124, err=f"ended after {timeout_s} s".encode())

    async def seclude(self, places: dict[str, int]) -> None:
        """Show all further commands an empty folder, of a given mode, at each of `places`.

        No earlier process sees what is written there, and none can reach it through /proc: for
        that it would need every capability of the later ones (ptrace(2), access mode checking).
        While there are such processes, the later ones have a root directory of their own.
        """
        self.rejoin()
        if self._pid is None or not self.alive:
            raise SandboxGone("the sandbox is gone")
        left = bool(await asyncio.to_thread(processes.members, self._pid))
        order = {
            "secluded": {"places": places, "size_mb": self.settings.disk_mb, "own_root": left},
            "process": self._process(ROOT, {}, "/"),
        }
        try:
            async with asyncio.timeout(SECLUDE_LIMIT_S):
                await self._take_mounts(self._pid, order)
        except TimeoutError as error:
            raise SandboxError("the sandbox does not let a process of ours run") from error

    async def _take_mounts(self, pid: int, order: dict[str, Any]) -> None:
        """Have a process make its mounts, take its namespace over, and let it end."""
        async with pipes(True) as (streams, standard):
            fork = await self._helpers.commands.fork(pid, order, standard, self._cgroups)
            try:
                if await streams.stdout.readline() != b"ready\n":
                    message = (await streams.stderr.read()).decode(errors="replace").strip()
                    raise SandboxError(f"nothing was secluded: {message[-300:]}")
                self._mounts = os.open(f"/proc/{fork.pid}/ns/mnt", os.O_RDONLY)
                streams.stdin.close()
                await fork.ended
            finally:
                fork.end()

    def rejoin(self) -> None:
        """Show further commands what all processes see, and drop the folders of `seclude`."""
        if self._mounts is not None:
            os.close(self._mounts)
            self._mounts = None

    async def run_agent(
        self,
        job: dict[str, Any],
        *,
        env: dict[str, str],
        cwd: str,
        user: Account,
        on_line: Callable[[bytes], None],
    ) -> Completed:
        """Run the agent of a job in this sandbox, and wait for it.

        `on_line` is given each line of the standard output as it comes. When this call is
        cancelled, the agent ends with all its descendants, as in `run`.
        """
        order = {"job": job, "process": self._process(user, env, cwd)}
        return await self._fork(self._helpers.agents, order, None, OUTPUT_LIMIT, on_line)

    async def _fork(
        self,
        forks: Forks,
        order: dict[str, Any],
        stdin: bytes | None,
        limit: int,
        on_line: Callable[[bytes], None] | None = None,
    ) -> Completed:
        if self._pid is None or not self.alive:
            raise SandboxGone("the sandbox is gone")
        async with pipes(stdin is not None) as (streams, standard):
            fork = await forks.fork(self._pid, order, standard, self._cgroups, self._mounts)
            self._running.add(fork.pid)
            try:
                done = await streams.communicate(fork.ended, stdin, limit, on_line)
            finally:
                self._running.discard(fork.pid)
                fork.end()
        if not self.alive:
            raise SandboxGone("the sandbox ended while a command ran in it")
        return done

    def open_written(self) -> tuple[int, int]:
        """Descriptors of what was written to the root and to /usr; they outlive the sandbox."""
        assert self._holder is not None
        stage = f"/proc/{self._holder.pid}/root{STAGE}"
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
        root = os.open(f"{stage}/u", flags)
        try:
            return root, os.open(f"{stage}/uu", flags)
        except OSError:
            os.close(root)
            raise

    def kill(self) -> None:
        """End every process of the sandbox, at once.

        They end with its first process, for which the holder waits and then ends too: no zombie
        is left to the host. Without a first process it is the holder that is ended.
        """
        pid = self._pid or (self._holder.pid if self._holder else None)
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    async def close(self) -> None:
        """End the sandbox and remove its cgroups. Safe to call twice."""
        if self._closed:
            return
        if self.alive:
            self._measure()
        self._closed = True
        for relay in self._relays:
            relay.close()
        if self._lookups is not None:
            self._lookups.close()
        if self._holder is not None and self._holder.returncode is None:
            self.kill()
            try:
                await asyncio.wait_for(self._holder.wait(), HOLDER_END_S)
            except TimeoutError:
                self._holder.kill()
                await self._holder.wait()
        self.rejoin()
        for directory in self._cgroups:
            await asyncio.to_thread(cgroups.remove, directory)

    def _process(self, user: Account, env: dict[str, str], cwd: str) -> dict[str, Any]:
        """What a process in a sandbox is to take on (`inside/enter.py`)."""
        numbers = [*CAPABILITIES.values(), *([] if self._mounts is None else [BLOCK_SUSPEND])]
        return {
            "env": {"PATH": PATH, "LANG": "C.UTF-8", **env},
            "cwd": cwd,
            "uid": user.uid,
            "gid": user.gid,
            "groups": user.groups,
            "capabilities": sum(1 << number for number in numbers),
        }
