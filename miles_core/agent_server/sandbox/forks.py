"""Processes of sandboxes as forks of two helpers: one for commands, one with the agent loaded.

A fork enters a sandbox in a fraction of the time that a chain of programs takes, and for an agent
no import is paid for in a trial. The helpers (`inside/fork_commands.py`, `inside/fork_agents.py`)
see what a sandbox shows of the agent, at the same paths and read-only, and nothing else of the
host. They are not dumpable: what runs in a sandbox cannot trace their forks or reach the host's
Python through them, though these were not executed inside.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miles_core.agent_server.sandbox import processes
from miles_core.agent_server.sandbox.errors import SandboxError, SandboxGone
from miles_core.agent_server.sandbox.system import (
    AGENT_CODE,
    AGENT_PACKAGES,
    agent_binds,
    agent_python,
)

PACKET_BYTES = 4096
LOAD_LIMIT_S = 60.0


class Fork:
    """One process. `ended` is its exit status, or the SandboxError of a status that is lost."""

    def __init__(self, pid: int, pidfd: int, ended: asyncio.Future[int]) -> None:
        self.pid = pid
        self.ended = ended
        self._pidfd = pidfd

    def end(self) -> None:
        """SIGKILL the process with all that descends from it, if it is alive; call once."""
        try:
            # Stopped, it cannot be waited for, so its pid stays its own.
            signal.pidfd_send_signal(self._pidfd, signal.SIGSTOP)
            processes.end_below(self.pid)
        except ProcessLookupError:
            pass
        finally:
            os.close(self._pidfd)


class Forks:
    """A helper of one server; it is started again when it died. `program` is its script of
    `inside/` with what follows the socket on its command line."""

    def __init__(self, *program: str) -> None:
        self._program = program
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._loaded: asyncio.Future[None] | None = None
        self._asked: list[asyncio.Future[Fork]] = []
        self._alive: dict[int, asyncio.Future[int]] = {}

    async def start(self) -> None:
        """Start the process if it is not there and wait until it is loaded; SandboxError."""
        if self._loaded is None:
            self._launch()
        assert self._loaded is not None
        try:
            await asyncio.wait_for(asyncio.shield(self._loaded), LOAD_LIMIT_S)
        except TimeoutError:
            self._end()
            name = self._program[0]
            raise SandboxError(f"{name} was not loaded in {LOAD_LIMIT_S:.0f} s") from None

    def _launch(self) -> None:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            script, *arguments = self._program
            python = [agent_python(), "-I", "-S", f"{AGENT_CODE}/{script}"]
            self._process = subprocess.Popen(
                [*_view(), *python, str(theirs.fileno()), *arguments],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        ours.setblocking(False)
        self._socket = ours
        self._loaded = loop.create_future()
        loop.add_reader(ours, self._read)

    def _read(self) -> None:
        """Take one packet; its end is the end of the process."""
        assert self._socket is not None and self._loaded is not None
        packet = b""
        given: list[int] = []
        with contextlib.suppress(ConnectionError):
            try:
                packet, given, _, _ = socket.recv_fds(self._socket, PACKET_BYTES, 1)
            except BlockingIOError:
                return
        if not packet:
            self._end()
            return
        told = json.loads(packet)
        if "loaded" in told:
            self._loaded.set_result(None)
        elif "code" in told:
            ended = self._alive.pop(told["pid"])
            if not ended.done():
                ended.set_result(told["code"])
        else:
            ended = asyncio.get_running_loop().create_future()
            self._alive[told["pid"]] = ended
            fork = Fork(told["pid"], given[0], ended)
            asked = self._asked.pop(0)
            if asked.done():  # cancelled meanwhile
                fork.end()
            else:
                asked.set_result(fork)

    async def fork(
        self,
        box: int,
        order: dict[str, Any],
        standard: list[int],
        cgroups: list[Path],
        mounts: int | None = None,
    ) -> Fork:
        """A process in the sandbox whose first process is `box`; raises SandboxError.

        `order` says what it is to be. `standard` holds the descriptors of its standard input,
        output and error, which this call closes here. `mounts` is the descriptor of another mount
        namespace for it.
        """
        with contextlib.ExitStack() as stack:
            for descriptor in standard:
                stack.callback(os.close, descriptor)
            await self.start()
            assert self._socket is not None
            try:
                sandbox = os.pidfd_open(box)
            except ProcessLookupError as error:
                raise SandboxGone("the sandbox is gone") from error
            stack.callback(os.close, sandbox)
            joined = [
                stack.enter_context(open(directory / "cgroup.procs", "wb")) for directory in cgroups
            ]
            orders = stack.enter_context(open(os.memfd_create("order"), "wb"))
            orders.write(json.dumps({**order, "apart": mounts is not None}).encode())
            orders.flush()
            orders.seek(0)
            given = [sandbox, orders.fileno(), *standard, *(file.fileno() for file in joined)]
            given += [] if mounts is None else [mounts]
            asked: asyncio.Future[Fork] = asyncio.get_running_loop().create_future()
            self._asked.append(asked)
            try:
                socket.send_fds(self._socket, [b"fork"], given)
            except OSError as error:
                self._end()
                raise SandboxError(f"{self._program[0]} is gone: {error}") from error
        return await asked

    def _end(self) -> None:
        """End the helper; what it had forked is told of by an error."""
        if self._socket is None or self._process is None or self._loaded is None:
            return
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        self._process.kill()
        code = self._process.wait()
        error = SandboxError(f"{self._program[0]} ended with {code}")
        waiting: list[asyncio.Future[Any]] = [self._loaded, *self._asked, *self._alive.values()]
        for future in waiting:
            if not future.done():
                future.set_exception(error)
                future.exception()  # nobody may be waiting
        self._asked.clear()
        self._alive.clear()
        self._socket = self._process = self._loaded = None

    def close(self) -> None:
        """End the process. Safe to call twice."""
        self._end()


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
