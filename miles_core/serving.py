"""How a service's process meets its surroundings: port, ready file, parent, exit status."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import uvicorn

from miles_core.errors import UserError

HIGHEST_PORT = 65535
EXIT_USAGE = 2
"""A person must change something first."""
EXIT_BUSY = 75
"""The port is in use: it may be free at another try."""


class PortInUse(UserError):
    """Another process listens on the port."""


def exit_status(error: UserError) -> int:
    """How a service that could not start ends."""
    return EXIT_BUSY if isinstance(error, PortInUse) else EXIT_USAGE


def bind(host: str, port: int, flag: str = "--port") -> socket.socket:
    """A listening socket; port 0 lets the kernel choose.

    Raises PortInUse, or UserError for an address that cannot be bound; `flag` names the port.
    """
    if not 0 <= port <= HIGHEST_PORT:
        raise UserError(f"{flag} {port} is no port", f"Take one from 1 to {HIGHEST_PORT}, or 0.")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sends without delay only where the protocol is named: else each answer waits 40 ms for
    # the acknowledgement of its head (RFC 896 meets RFC 1122, 4.2.3.2).
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(
                f"cannot listen on {host} port {port}: it is in use",
                f"Choose another with {flag}, or 0 for a free one.",
            ) from error
        raise UserError(
            f"cannot listen on {host} port {port}: {error.strerror}", f"See --host and {flag}."
        ) from error
    return listener


def url_of(host: str, port: int) -> str:
    """The base URL by which this machine reaches a server that is bound to an address."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def check_ready_file(path: Path) -> None:
    """Raise UserError for a path at which `write_ready_file` could not write."""
    if path.is_dir():
        raise UserError(f"--ready-file {path} is a folder", "Name a file in it.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--ready-file {path}: {error.strerror or error}") from error


def write_ready_file(path: Path, host: str, port: int) -> None:
    """Say that the service can serve: pid, host, port and url, renamed into place.

    Raises UserError when it cannot be written; nothing is left then.
    """
    check_ready_file(path)
    content = {"pid": os.getpid(), "host": host, "port": port, "url": url_of(host, port)}
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(json.dumps(content), "utf-8")
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise UserError(f"--ready-file {path}: {error.strerror or error}") from error


def process_start(pid: int) -> str | None:
    """When a process started, in clock ticks since boot; None when it is gone or a zombie.

    Raises OSError when that cannot be told, as when there is no file descriptor left.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else fields[19]


def watch_parent(pid: int, gone: Callable[[], object]) -> None:
    """Call `gone` from a thread once process `pid` has ended (its id reused counts as ended)."""
    started = process_start(pid)

    def lives() -> bool:
        try:
            return process_start(pid) == started
        except OSError:
            return True  # until the opposite is seen

    def watch() -> None:
        while started is not None and lives():
            time.sleep(0.5)
        gone()

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


class Server(uvicorn.Server):
    """uvicorn that writes the ready file once it serves, and ends with its parent."""

    def __init__(
        self, config: uvicorn.Config, ready_file: Path | None, parent_pid: int | None
    ) -> None:
        super().__init__(config)
        self._ready_file = ready_file
        self._parent_pid = parent_pid

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Shut down cleanly; unlike uvicorn's own, do not raise the signal again afterwards."""
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if not self.started or not sockets:
            return
        if self._parent_pid is not None:
            watch_parent(self._parent_pid, lambda: os.kill(os.getpid(), signal.SIGTERM))
        host, port = sockets[0].getsockname()[:2]
        if self._ready_file is not None:
            write_ready_file(self._ready_file, host, port)
        print(f"serving on {url_of(host, port)}", flush=True)
