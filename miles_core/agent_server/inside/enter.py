"""How a process comes into a sandbox and what it gives up there.

A helper forks a spawner, which joins the cgroups of a sandbox and, when that is up, its namespaces.
It is not itself in the sandbox's pid namespace, so nothing inside sees it, but what it forks is.
Each command is such a fork, which first gives up its privileges.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import socket
import sys
from collections.abc import Callable
from typing import Any

from apart import set_apart
from hold import await_first, hold
from seccomp import Filter
from serve import answer, serve
from system_calls import (
    CAPABILITY_VERSION_3,
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWUSER,
    CLONE_NEWUTS,
    PR_CAPBSET_DROP,
    PR_CAPBSET_READ,
    PR_SET_DUMPABLE,
    PR_SET_NO_NEW_PRIVS,
    checked,
    libc,
    prctl,
)

NAMESPACES = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET

ENDS_FIRST = "500"
"""Of 1000: what a process has beyond its own memory when one must end (proc(5))."""

Command = Callable[[dict[str, Any]], int]
"""What a process does once it is inside, with its order; returns the exit status."""

confine = Filter()


def help_server(descriptor: int, command: Command) -> None:
    """Be a helper of the agent server: fork holders (`hold.py`) and spawners.

    A spawner is given a socket to the agent server and a sandbox: a pidfd of its first process, or
    for a new one what `await_first` takes and the mount namespace of this host. The `cgroup.procs`
    files to join follow.
    """

    def work(order: dict[str, Any], given: list[int]) -> int:
        if "argv" in order:
            return hold(order, given)
        os.setsid()
        with socket.socket(fileno=given[0]) as server:
            _spawn(server, command, order["new"], given[1:])
        return 0

    gc.collect()
    gc.freeze()
    prctl(PR_SET_DUMPABLE, 0)
    with socket.socket(fileno=descriptor) as server:
        serve(server, work, 0)


def _spawn(server: socket.socket, command: Command, new: bool, given: list[int]) -> None:
    """Enter a sandbox, keep nothing else open, and fork commands from then on."""
    try:
        first = _enter(new, given)
    except Exception as error:
        with contextlib.suppress(ConnectionError):  # nobody may be waiting any more
            answer(server, {"error": str(error)})
        return
    os.closerange(3, server.fileno())
    os.closerange(server.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
    prctl(PR_SET_DUMPABLE, 0)
    serve(server, lambda order, given: _start(order, given, command), first)


def _enter(new: bool, given: list[int]) -> int:
    """Enter a sandbox; its first process where it is new, else 0."""
    count = 3 if new else 1
    for cgroup in given[count:]:
        os.write(cgroup, b"0")
    if not new:
        os.setns(given[0], NAMESPACES)
        return 0
    told, ids, host = given[:count]
    os.setns(host, CLONE_NEWNS)
    first = await_first(told, ids)
    os.setns(os.pidfd_open(first), NAMESPACES)
    return first


def _start(order: dict[str, Any], given: list[int], command: Command) -> int:
    """Carry out what a process of its own is to do, in another mount namespace if one is given.

    One that makes such a namespace waits for an end of file, so that it can be taken over.
    """
    os.setsid()
    for target, descriptor in enumerate(given[:3]):
        os.dup2(descriptor, target)
    for mounts in given[3:]:
        os.setns(mounts, CLONE_NEWNS)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    if "apart" in order:
        set_apart(**order["apart"])
        print("ready", flush=True)
        sys.stdin.read()
        return 0
    become(**order["process"])
    return command(order)


def become(
    uid: int, gid: int, groups: list[int], capabilities: int, env: dict[str, str], cwd: str
) -> None:
    """Take on the ids, the environment and the directory; give up everything else.

    At most the capabilities of the bit mask are kept, and those for root. When the memory of the
    sandbox is used up, this process ends before those that hold the sandbox.
    """
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(ENDS_FIRST)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    capability = 0
    while libc.prctl(PR_CAPBSET_READ, capability, 0, 0, 0) >= 0:
        if not capabilities >> capability & 1:
            prctl(PR_CAPBSET_DROP, capability)
        capability += 1
    os.setgroups(groups)
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    held = capabilities if uid == 0 else 0
    low, high = held & 0xFFFFFFFF, held >> 32
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    data = (ctypes.c_uint32 * 6)(low, low, 0, high, high, 0)
    checked(libc.capset(header, data), "capset")
    prctl(PR_SET_DUMPABLE, 0)
    confine.install(libc)
    os.environ.clear()
    os.environ.update(env)
    try:
        os.chdir(cwd)
    except OSError as error:  # an agent has taken it away, which keeps nobody from grading
        print(f"{error}; in / instead", file=sys.stderr)
        os.chdir("/")
