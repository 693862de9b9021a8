"""Relays: the only way out of a sandbox.

A thread enters the network namespace of the sandbox and opens a listening socket there. The
event loop of this process, which stays in the host's namespace, serves it and connects to one
fixed upstream address.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import socket
import threading

from miles_core.agent_server.sandbox.errors import SandboxError

CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
CHUNK = 65536
INSIDE_HOST = "127.0.0.1"
CONNECTIONS = 64
"""How many one relay has open at once; a further caller finds its connection closed."""


def listen_inside(pid: int, port: int) -> socket.socket:
    """A socket that listens on `port` of the loopback interface of the namespaces of `pid`."""
    listener = socket_inside(pid, socket.SOCK_STREAM, (INSIDE_HOST, port))
    listener.listen(64)
    return listener


def socket_inside(pid: int, kind: socket.SocketKind, address: tuple[str, int]) -> socket.socket:
    """A socket bound in the network namespace of `pid`; raises SandboxError. IPv6 is IPv6 alone.

    The kernel lets a thread enter the network namespace when it is privileged in the user
    namespace that owns it; root of the host is.
    """
    made: dict[str, socket.socket | OSError] = {}

    def run() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        try:
            fd = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
            try:
                if libc.setns(fd, CLONE_NEWNET) != 0:
                    code = ctypes.get_errno()
                    raise OSError(code, os.strerror(code))
            finally:
                os.close(fd)
            family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
            # asyncio sends without delay only where the protocol is named (serving.bind).
            protocol = socket.IPPROTO_TCP if kind == socket.SOCK_STREAM else socket.IPPROTO_UDP
            bound = socket.socket(family, kind, protocol)
            if family == socket.AF_INET6:
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            bound.setblocking(False)
            made["socket"] = bound
        except OSError as error:
            made["error"] = error

    thread = threading.Thread(target=run, name="sandbox-relay")
    thread.start()
    thread.join()
    bound = made.get("socket")
    if not isinstance(bound, socket.socket):
        raise SandboxError(f"no socket on port {address[1]} in the sandbox: {made.get('error')}")
    return bound


class Relay:
    """Serves a socket of the sandbox and connects each caller to one upstream address."""

    def __init__(self, listener: socket.socket, host: str, port: int) -> None:
        self._listener = listener
        self._upstream = (host, port)
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, sock=self._listener)

    def close(self) -> None:
        """Stop listening and end what is open."""
        if self._server is not None:
            self._server.close()
        for task in self._open:
            task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) >= CONNECTIONS:
            writer.close()
            return
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        upstream_writer: asyncio.StreamWriter | None = None
        try:
            upstream_reader, upstream_writer = await asyncio.open_connection(*self._upstream)
            await asyncio.gather(_pump(reader, upstream_writer), _pump(upstream_reader, writer))
        except (OSError, asyncio.CancelledError):
            return  # the caller sees a closed connection, which is all there is to say
        finally:
            self._open.discard(task)
            for side in (writer, upstream_writer):
                if side is not None:
                    side.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy until the end, and pass the end on."""
    while data := await reader.read(CHUNK):
        writer.write(data)
        await writer.drain()
    with contextlib.suppress(OSError):
        if writer.can_write_eof():
            writer.write_eof()
