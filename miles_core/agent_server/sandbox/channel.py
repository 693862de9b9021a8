"""Our ends of processes that fork on request, and of what they have forked (`inside/serve.py`)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from typing import Any

from miles_core.agent_server.sandbox import processes
from miles_core.agent_server.sandbox.errors import NoProcess, SandboxError

PACKET_BYTES = 4096
KILLED = 137
"""The exit status of a process that was ended by SIGKILL, as a shell has it."""


class Fork:
    """One process. `ended` is its exit status, as a shell has it."""

    def __init__(self, pid: int, pidfd: int, ended: asyncio.Future[int]) -> None:
        self.pid = pid
        self.ended = ended
        self._pidfd = pidfd

    def end(self) -> None:
        """SIGKILL the process with all that descends from it, if it is alive; call once."""
        try:
            processes.end_tree(self.pid, self._pidfd)
        except ProcessLookupError:
            pass
        finally:
            os.close(self._pidfd)

    def let_go(self) -> None:
        """Leave the process alone; call this or `end`."""
        os.close(self._pidfd)


async def forked(asked: asyncio.Future[Fork]) -> Fork:
    """Wait for a process that was asked for, which ends when this is cancelled."""
    try:
        return await asked
    except BaseException:
        abandon(asked)
        raise


def abandon(asked: asyncio.Future[Fork]) -> None:
    """End a process that was asked for, now or when it is there."""
    if not asked.cancel() and not asked.cancelled() and asked.exception() is None:
        asked.result().end()


class Channel:
    """A socket to a process that forks; `ready` when it does, with the number that it tells, or
    the SandboxError of why not.

    Whoever waits for the end of a process that it forked is told `KILLED` when it ends itself:
    nothing then knows how the other ended.
    """

    def __init__(self, name: str, ours: socket.socket) -> None:
        self.name = name
        self.ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._socket: socket.socket | None = ours
        self._asked: list[asyncio.Future[Fork]] = []
        self._alive: dict[int, asyncio.Future[int]] = {}
        ours.setblocking(False)
        asyncio.get_running_loop().add_reader(ours, self._read)

    @property
    def closed(self) -> bool:
        """Whether nothing more can be forked."""
        return self._socket is None

    def fork(self, order: dict[str, Any], descriptors: list[int]) -> asyncio.Future[Fork]:
        """A process that has `descriptors`, which may be closed now, and carries `order` out.

        Raises SandboxError, at once or later.
        """
        if self._socket is None:
            raise SandboxError(f"{self.name} is gone")
        asked: asyncio.Future[Fork] = asyncio.get_running_loop().create_future()
        with open(os.memfd_create("order"), "wb") as file:
            file.write(json.dumps(order).encode())
            file.flush()
            file.seek(0)
            try:
                socket.send_fds(self._socket, [b"order"], [file.fileno(), *descriptors])
            except OSError as error:
                self.close(f"it is gone: {error}")
                raise SandboxError(f"{self.name} is gone: {error}") from error
        self._asked.append(asked)
        return asked

    def _read(self) -> None:
        """Take one packet; its end is the end of the process."""
        assert self._socket is not None
        packet = b""
        given: list[int] = []
        with contextlib.suppress(ConnectionError):
            try:
                packet, given, _, _ = socket.recv_fds(self._socket, PACKET_BYTES, 1)
            except BlockingIOError:
                return
        if not packet:
            self.close("it ended")
            return
        told = json.loads(packet)
        if "ready" in told:
            self.ready.set_result(told["ready"])
        elif "code" in told:
            _set(self._alive.pop(told["pid"]), told["code"])
        elif "pid" in told:
            self._forked(told["pid"], given[0])
        elif not self.ready.done():
            self.close(told["error"])
        else:
            asked = self._asked.pop(0)
            if not asked.done():
                asked.set_exception(NoProcess(told["error"]))

    def _forked(self, pid: int, pidfd: int) -> None:
        ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._alive[pid] = ended
        fork = Fork(pid, pidfd, ended)
        asked = self._asked.pop(0)
        if asked.done():  # cancelled meanwhile
            fork.end()
        else:
            asked.set_result(fork)

    def close(self, why: str = "it is closed") -> None:
        """Let the process end, after what it has forked. Safe to call twice."""
        if self._socket is None:
            return
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        self._socket = None
        error = SandboxError(f"{self.name}: {why}")
        waiting: list[asyncio.Future[Any]] = [self.ready, *self._asked]
        for future in waiting:
            if not future.done():
                future.set_exception(error)
                future.exception()  # nobody may be waiting
        for ended in self._alive.values():
            _set(ended, KILLED)
        self._asked.clear()
        self._alive.clear()


def _set(future: asyncio.Future[int], code: int) -> None:
    if not future.done():
        future.set_result(code)
