"""Forking on request: what the helpers and the spawners of the sandboxes share.

A packet of the agent server asks for one process. It carries descriptors, that of a file with the
order first. Answers are JSON: `{"pid"}` with a pidfd of the new process, later `{"pid", "code"}`,
or `{"error"}` when there can be no further process. A first answer, `{"ready": number}` or
`{"error"}`, tells whether there will be any. The end of the socket is the end of this process.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

PACKET_BYTES = 4096
MOST_DESCRIPTORS = 16
LAST_CHILDREN_S = 5.0
"""How long a process that is to end waits for the end of what it has forked."""

Work = Callable[[dict[str, Any], list[int]], int]
"""What a forked process does with its order and its descriptors; returns the exit status."""


def receive(server: socket.socket) -> list[int] | None:
    """The descriptors of the next packet; None at the end."""
    try:
        packet, given, _, _ = socket.recv_fds(server, PACKET_BYTES, MOST_DESCRIPTORS)
    except ConnectionResetError:  # closed over there, with answers that nobody had read
        return None
    return given if packet else None


def answer(server: socket.socket, told: dict[str, Any], *descriptors: int) -> None:
    socket.send_fds(server, [json.dumps(told).encode()], descriptors)


def serve(server: socket.socket, work: Work, ready: int) -> None:
    """Tell that it is `ready`, then fork when the server asks for it, and tell of each end."""
    children: dict[int, int] = {}
    poll = select.poll()
    poll.register(server, select.POLLIN)
    with contextlib.suppress(ConnectionError):  # the agent server is gone
        answer(server, {"ready": ready})
        while True:
            for ready, _ in poll.poll():
                if ready != server.fileno():
                    poll.unregister(ready)
                    pid, code = _ended(children, ready)
                    answer(server, {"pid": pid, "code": code})
                    continue
                given = receive(server)
                if given is None:
                    _wait_for(children)
                    return
                ended = _fork(server, given, work, children)
                if ended is not None:
                    poll.register(ended, select.POLLIN)
                for one in given:
                    os.close(one)


def _fork(
    server: socket.socket, given: list[int], work: Work, children: dict[int, int]
) -> int | None:
    """A pidfd of a new process, of which the server is told; None when there can be none."""
    try:
        pid = os.fork()
    except OSError as error:  # no process or memory is left where this one is
        answer(server, {"error": f"no further process: {error.strerror}"})
        return None
    if pid == 0:
        _child(given, work)
    ended = os.pidfd_open(pid)
    children[ended] = pid
    answer(server, {"pid": pid}, ended)
    return ended


def _ended(children: dict[int, int], ended: int) -> tuple[int, int]:
    """The pid of a child that has ended, and its exit status as a shell has it."""
    os.close(ended)
    pid = children.pop(ended)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return pid, code if code >= 0 else 128 - code


def _wait_for(children: dict[int, int]) -> None:
    """Take up the ends of the last children, so that no zombie is left to the host."""
    end = time.monotonic() + LAST_CHILDREN_S
    poll = select.poll()
    for ended in children:
        poll.register(ended, select.POLLIN)
    while children and (left := end - time.monotonic()) > 0:
        for ready, _ in poll.poll(left * 1000):
            poll.unregister(ready)
            _ended(children, ready)


def _child(given: list[int], work: Work) -> None:
    """The forked process; it never returns."""
    code = 1
    try:
        with open(given[0], "rb") as file:
            order = json.load(file)
        code = work(order, given[1:])
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
