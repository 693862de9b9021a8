"""Ranks of a test in processes of their own, forked from one that has imported the trainer."""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

PORTS = 32  # most process groups that the ranks of a call may start one after the other
_held: list[socket.socket] = []


def hold_ports(count: int) -> None:
    """Listen at free ports for ranks that are forked now; they are nobody else's until then."""
    let_go()
    for _ in range(count):
        _held.append(socket.create_server(("127.0.0.1", 0)))


def let_go() -> None:
    while _held:
        _held.pop().close()


def meet(rank: int) -> dict[str, int | None]:
    """Where the ranks of the next process group find each other, as a worker's arguments."""
    held = _held.pop()
    port: int = held.getsockname()[1]
    if rank:
        held.close()
    return {"master_port": port, "listener": None if rank else held.detach()}


@cache
def _server() -> subprocess.Popen[str]:
    """Ends with this process, which holds the other end of its standard input."""
    server = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("rank_server.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    atexit.register(server.kill)
    return server


def fork_ranks(
    module: str, world: int, out: Path, request: Any, timeout_s: float = 600
) -> list[Any]:
    """What `rank_main(request, rank, world, out)` of a module returns in each rank."""
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    call = {
        "module": module,
        "world": world,
        "out": str(out),
        "request": request,
        "timeout_s": timeout_s,
    }
    server.stdin.write(json.dumps(call) + "\n")
    server.stdin.flush()
    codes = json.loads(server.stdout.readline())
    assert codes == [0] * world, f"exit statuses of the ranks: {codes}"
    return [json.loads(out.with_name(f"{out.name}.rank{r}").read_text()) for r in range(world)]
