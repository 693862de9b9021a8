"""One sandbox: its life, and the commands that are run in it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miles_core.agent_server.sandbox import cgroups, processes
from miles_core.agent_server.sandbox.accounts import ROOT, Account
from miles_core.agent_server.sandbox.askers import asked_by
from miles_core.agent_server.sandbox.errors import NoProcess, SandboxGone
from miles_core.agent_server.sandbox.forks import Forks, Helpers, Spawner
from miles_core.agent_server.sandbox.holder import Holder
from miles_core.agent_server.sandbox.layers import Root
from miles_core.agent_server.sandbox.network import Network
from miles_core.agent_server.sandbox.privileges import taken_on
from miles_core.agent_server.sandbox.secluded import make_mounts, text_of
from miles_core.agent_server.sandbox.streams import DRAIN_S, OUTPUT_LIMIT, Completed, pipes

NOT_STARTED = 126
"""The exit status, as a shell has it, of a command for which there was no process."""

UP_POLL_S = 0.01


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
        self._earlier: list[list[Path]] = []
        """The cgroups of what earlier commands left running, when later ones have others."""
        self._holder = Holder()
        self._network = Network()
        self._running: set[int] = set()
        self._spawner: Spawner | None = None
        self._mounts: int | None = None
        """The mount namespace of further commands, when it is not that of the first process."""
        self._kept = contextlib.AsyncExitStack()
        """Our ends of the programs that stay, which are there as long as the sandbox."""
        self._closed = False
        self.disk_used: int | None = None
        """Bytes in the writable layers, once it is closed."""
        self.memory_peak: int | None = None
        """Most bytes of memory at once, once it is closed; None where no cgroup tells."""

    async def start(self) -> None:
        """Make the namespaces; raises SandboxError with what the tools said."""
        settings = self.settings
        self._cgroups = self._tree.make(self.name, settings.limits)
        self._spawner = await self._holder.start(
            self._helpers.commands,
            self.name,
            settings.root,
            settings.disk_mb,
            settings.binds,
            self._cgroups,
        )
        assert self._holder.pid is not None
        await self._network.open(self._holder.pid, settings.relays, self._looked_up)

    def _looked_up(self, name: str, port: int) -> None:
        if self._holder.pid is not None:
            self.settings.on_name(name, asked_by(self._running, self._holder.pid, port))

    @property
    def pid(self) -> int | None:
        """The first process of the sandbox, as this host knows it; None where there is none."""
        return self._holder.pid if self.alive else None

    @property
    def alive(self) -> bool:
        """Whether commands can be run."""
        pid = self._holder.pid
        return pid is not None and not self._closed and not processes.exiting(pid)

    def members(self) -> frozenset[processes.Member]:
        """The processes that were started in the sandbox; none when it has ended."""
        pid = self.pid
        if pid is None:
            return frozenset()
        if not self._cgroups:
            return processes.members(pid)
        among = [cgroups.members(places[0]) for places in (*self._earlier, self._cgroups)]
        return processes.members(pid, itertools.chain.from_iterable(among))

    def memory_kills(self) -> int:
        """How many of its processes were ended so far for a lack of memory."""
        return cgroups.memory_kills(self._cgroups)

    def _measure(self) -> None:
        """Note the space that was used, while the sandbox is there."""
        peaks = [cgroups.memory_peak(places) for places in (*self._earlier, self._cgroups)]
        self.memory_peak = max((peak for peak in peaks if peak is not None), default=None)
        with contextlib.suppress(OSError):  # it ended by itself
            # An overlay's numbers are those of its upper layer, a tmpfs of this sandbox alone.
            disk = os.statvfs(f"/proc/{self._holder.pid}/root")
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
        order = {"argv": argv, "process": self._taken_on(user, env or {}, cwd)}
        return await self._carry_out(order, stdin, timeout_s, limit)

    async def files(
        self,
        order: dict[str, Any],
        *,
        user: Account = ROOT,
        stdin: bytes | None = None,
        timeout_s: float | None = None,
        limit: int = OUTPUT_LIMIT,
    ) -> Completed:
        """Do what an order of `inside/files.py` says, as a command that is no program."""
        process = self._taken_on(user, {}, "/")
        return await self._carry_out({"files": order, "process": process}, stdin, timeout_s, limit)

    async def _carry_out(
        self, order: dict[str, Any], stdin: bytes | None, timeout_s: float | None, limit: int
    ) -> Completed:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._fork(await self._present(), order, stdin, limit)
        except TimeoutError:
            return Completed(124, err=f"ended after {timeout_s} s".encode())

    async def _present(self) -> Spawner:
        """What commands are forked from; made anew when a lack of memory has ended it."""
        if self._spawner is None or self._spawner.closed:
            if self._spawner is not None:
                self._spawner.close()
            self._spawner = await self._enter(self._helpers.commands)
        return self._spawner

    async def _enter(self, helper: Forks) -> Spawner:
        pid = self.pid
        if pid is None:
            raise SandboxGone("the sandbox is gone")
        return await helper.enter(self.name, pid, self._cgroups)

    def text_of(self, path: str) -> str:
        """What is in a file, without a process inside; empty where there is no such file."""
        return "" if self.pid is None else text_of(self.pid, path)

    async def seclude(
        self, places: dict[str, int], restored: tuple[str, ...], files: dict[str, str]
    ) -> None:
        """Show all further commands an empty folder, of a given mode, at each of `places`.

        No earlier process sees what is written there, and none can reach it through /proc: for
        that it would need every capability of the later ones (ptrace(2), access mode checking).
        While there are such processes, the later ones have a root directory of their own.
        Each of `restored` is made a folder for everybody first, in the sight of all. Each of
        `files` has its text, and is none where that is empty. All of the limits is free for the
        later commands, whatever has been used up.
        """
        self.rejoin()
        self._have_room()
        spawner, size_mb = await self._present(), self.settings.disk_mb
        self._mounts = await make_mounts(spawner, places, size_mb, list(restored), files)

    def _have_room(self) -> None:
        """Give later commands cgroups of their own if an earlier one has left something running."""
        limits = self.settings.limits
        if self._cgroups and self.members():
            number = len(self._earlier) + 2
            self._earlier.append(self._cgroups)
            self._cgroups = self._tree.make(f"{self.name}.{number}", limits)
            if self._spawner is not None:
                self._spawner.close()
                self._spawner = None
        elif limits.memory_mb:
            cgroups.make_room(self._cgroups, limits.memory_mb)

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
        order = {"job": job, "process": self._taken_on(user, env, cwd)}
        spawner = await self._enter(self._helpers.agents)
        try:
            return await self._fork(spawner, order, None, OUTPUT_LIMIT, on_line)
        finally:
            spawner.close()

    async def _fork(
        self,
        spawner: Spawner,
        order: dict[str, Any],
        stdin: bytes | None,
        limit: int,
        on_line: Callable[[bytes], None] | None = None,
    ) -> Completed:
        async with pipes(stdin is not None) as (streams, standard):
            try:
                fork = await spawner.fork(order, standard, self._mounts)
            except NoProcess as error:
                if not self.alive:
                    raise SandboxGone("the sandbox is gone") from error
                return Completed(NOT_STARTED, err=str(error).encode())
            self._running.add(fork.pid)
            try:
                done = await streams.communicate(fork.ended, stdin, limit, on_line)
            finally:
                self._running.discard(fork.pid)
                fork.end()
        if not self.alive:
            raise SandboxGone("the sandbox ended while a command ran in it")
        return done

    async def start_program(
        self,
        argv: list[str],
        *,
        env: dict[str, str],
        cwd: str,
        user: Account,
        is_up: Callable[[], bool],
        limit_s: float,
    ) -> Completed | None:
        """Start a program that stays in the sandbox, and wait until `is_up`, for `limit_s` at most.

        None then, and when it has ended well before; else `err` is what it said at last. Later on
        its output, and that of what it started, is read and dropped until the sandbox ends.
        """
        order = {"argv": argv, "stays": True, "process": self._taken_on(user, env, cwd)}
        spawner = await self._present()
        async with contextlib.AsyncExitStack() as stack:
            streams, standard = await stack.enter_async_context(pipes(True))
            fork = await spawner.fork(order, standard, self._mounts)
            said = bytearray()
            reading = asyncio.create_task(streams.keep_end(said))
            stack.callback(reading.cancel)
            try:
                end = time.monotonic() + limit_s
                while not (fork.ended.done() or is_up()) and time.monotonic() < end:
                    await asyncio.wait([fork.ended], timeout=UP_POLL_S)
                streams.stdin.close()
                code = await fork.ended
            finally:
                fork.end()
            if code != 0:
                await asyncio.wait([reading], timeout=DRAIN_S)
                return Completed(code, err=bytes(said))
            self._kept.push_async_exit(stack.pop_all())
        return None

    def open_written(self) -> tuple[int, int]:
        """Descriptors of what was written to the root and to /usr; they outlive the sandbox."""
        return self._holder.open_written()

    def kill(self) -> None:
        """End every process of the sandbox, at once, without asking any of them."""
        self._holder.kill()

    async def close(self) -> None:
        """End the sandbox and remove its cgroups. Safe to call twice."""
        if self._closed:
            return
        if self.alive:
            self._measure()
        self._closed = True
        self._network.close()
        self.rejoin()
        if self._spawner is not None:
            self._spawner.close()
        await self._holder.close()
        await self._kept.aclose()
        places = itertools.chain(self._cgroups, *self._earlier)
        await asyncio.to_thread(lambda: [cgroups.remove(place) for place in places])

    def _taken_on(self, user: Account, env: dict[str, str], cwd: str) -> dict[str, Any]:
        return taken_on(user, env, cwd, above=self._mounts is not None)
