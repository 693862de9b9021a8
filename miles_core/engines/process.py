"""How the engine's process meets its surroundings: port, ready file, parent."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import orjson

from miles_core.errors import UserError


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 lets the kernel choose.

    Raises:
        UserError: the port is in use, or the address cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise UserError(
                f"port {port} on {host} is in use", "give another --port, or 0 for a free one"
            ) from error
        raise UserError(f"cannot bind --host {host} --port {port}: {error.strerror}") from error
    return listener


def write_ready_file(path: Path, host: str, port: int) -> None:
    """Say that the service can serve: pid, host, port and url, renamed into place."""
    shown = f"[{host}]" if ":" in host else host
    content = {"pid": os.getpid(), "host": host, "port": port, "url": f"http://{shown}:{port}"}
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_bytes(orjson.dumps(content))
    beside.replace(path)


def _start_time(pid: int) -> str | None:
    """When a process started (clock ticks), or None when it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def watch_parent(pid: int, gone: Callable[[], None]) -> None:
    """Call `gone` from a thread once process `pid` has ended (its id reused counts as ended)."""
    started = _start_time(pid)

    def watch() -> None:
        while started is not None and _start_time(pid) == started:
            time.sleep(0.5)
        gone()

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
