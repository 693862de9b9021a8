"""Processes of sandboxes as forks of two helpers: one for commands, one with the agent loaded.

A fork enters a sandbox in a fraction of the time that a chain of programs takes, and for an agent
no import is paid for in a trial. The helpers (`inside/fork_commands.py`, `inside/fork_agents.py`)
see what a sandbox shows of the agent, at the same paths and read-only, and nothing else of the
host. They are not dumpable: what runs in a sandbox cannot trace their forks or reach the host's
Python through them, though these were not executed inside.

For each sandbox a helper forks a spawner: a process that joins the cgroups and the namespaces once
and forks the commands from there. To join a cgroup is a wait for the kernel of milliseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miles_core.agent_server.sandbox.channel import Channel, Fork, forked
from miles_core.agent_server.sandbox.errors import SandboxError, SandboxGone
from miles_core.agent_server.sandbox.system import (
    AGENT_CODE,
    AGENT_PACKAGES,
    agent_binds,
    agent_python,
)

LOAD_LIMIT_S = 60.0
ENTER_LIMIT_S = 30.0
"""How long a spawner may take to be in its sandbox."""


class Spawner:
    """A process in the namespaces of one sandbox, from which its commands are forked."""

    def __init__(self, process: Fork, channel: Channel) -> None:
        self._process = process
        self._channel = channel
        self._released = False

    @property
    def name(self) -> str:
        return self._channel.name

    @property
    def closed(self) -> bool:
        return self._channel.closed

    async def entered(self) -> int:
        """Wait until it is in its sandbox; the first process of a new one. Raises SandboxError."""
        try:
            async with asyncio.timeout(ENTER_LIMIT_S):
                return await asyncio.shield(self._channel.ready)
        except TimeoutError as error:
            raise SandboxError("the sandbox does not let a process of ours run") from error

    async def fork(
        self, order: dict[str, Any], standard: list[int], mounts: int | None = None
    ) -> Fork:
        """A process in the sandbox; raises SandboxError, NoProcess when there can be none.

        `standard` are the descriptors of its standard input, output and error, which this call
        closes here, `mounts` is that of another mount namespace for it.
        """
        try:
            asked = self._channel.fork(order, standard if mounts is None else [*standard, mounts])
        finally:
            for descriptor in standard:
                os.close(descriptor)
        return await forked(asked)

    def close(self) -> None:
        """Let the process end. Safe to call twice."""
        if not self._released:
            self._released = True
            self._channel.close()
            self._process.let_go()


class Forks:
    """A helper of one server; it is started again when it died. `program` is its script of
    `inside/` with what follows the socket on its command line."""

    def __init__(self, *program: str) -> None:
        self._program = program
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None

    async def start(self) -> Channel:
        """Start the process if it is not there and wait until it is loaded; SandboxError."""
        if self._channel is None or self._channel.closed:
            self.close()
            self._channel = self._launch()
        channel = self._channel
        try:
            async with asyncio.timeout(LOAD_LIMIT_S):
                await asyncio.shield(channel.ready)
        except TimeoutError:
            channel.close()
            message = f"{channel.name} was not loaded in {LOAD_LIMIT_S:.0f} s"
            raise SandboxError(message) from None
        return channel

    def _launch(self) -> Channel:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            script, *arguments = self._program
            python = [agent_python(), "-I", "-S", f"{AGENT_CODE}/{script}"]
            self._process = subprocess.Popen(
                [*_view(), *python, str(theirs.fileno()), *arguments],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        return Channel(script, ours)

    async def spawner(
        self, name: str, sandbox: list[int], cgroups: list[Path], new: bool = False
    ) -> Spawner:
        """A process that enters a sandbox (`inside/enter.py`: help_server); raises SandboxError.

        `sandbox` holds a pidfd of its first process, or for a new one where to wait for it.
        """
        helper = await self.start()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.ExitStack() as stack:
            stack.enter_context(theirs)
            channel = Channel(f"what starts commands in {name}", ours)
            given = [theirs.fileno(), *sandbox, *joined(cgroups, stack)]
            try:
                process = await forked(helper.fork({"new": new}, given))
            except BaseException:
                channel.close()
                raise
        return Spawner(process, channel)

    async def enter(self, name: str, pid: int, cgroups: list[Path]) -> Spawner:
        """A process in the sandbox whose first process is `pid`; raises SandboxError."""
        try:
            first = os.pidfd_open(pid)
        except ProcessLookupError as error:
            raise SandboxGone("the sandbox is gone") from error
        try:
            spawner = await self.spawner(name, [first], cgroups)
        finally:
            os.close(first)
        try:
            await spawner.entered()
        except BaseException:
            spawner.close()
            raise
        return spawner

    def close(self) -> None:
        """End the process. Safe to call twice."""
        if self._channel is not None:
            self._channel.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def joined(cgroups: list[Path], stack: contextlib.ExitStack) -> list[int]:
    """Descriptors with which a process joins cgroups, closed with `stack`."""
    descriptors = []
    for place in cgroups:
        descriptors.append(os.open(place / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC))
        stack.callback(os.close, descriptors[-1])
    return descriptors


@dataclass
class Helpers:
    """The two helpers of one server."""

    commands: Forks = field(default_factory=lambda: Forks("fork_commands.py"))
    agents: Forks = field(default_factory=lambda: Forks("fork_agents.py", AGENT_PACKAGES))

    async def start(self) -> None:
        """Start both; raises SandboxError."""
        await asyncio.gather(self.commands.start(), self.agents.start())

    def close(self) -> None:
        """End both. Safe to call twice."""
        self.commands.close()
        self.agents.close()


def _view() -> list[str]:
    """The command that runs another where there is nothing but programs and the agent's code."""
    words = ["bwrap", "--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        if os.path.islink(f"/{name}"):
            words += ["--symlink", os.readlink(f"/{name}").lstrip("/"), f"/{name}"]
    words += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache", "--dev", "/dev"]
    for source, target in agent_binds():
        words += ["--ro-bind", source, target]
    return [*words, "--die-with-parent", "--new-session", "--clearenv", "--cap-add", "ALL"]
