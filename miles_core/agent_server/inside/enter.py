"""Forking into sandboxes: what the process of the commands and that of the agents share.

A packet of the agent server asks for one process and carries descriptors: a pidfd of the sandbox,
a file with the order, standard input, output and error, the `cgroup.procs` files to join, and, for
an order that is `apart`, a mount namespace to enter instead of the sandbox's. Answers are JSON:
`{"pid"}` with a pidfd of the new process, and later `{"pid", "code"}`. The end of the socket is the
end of this process.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import select
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any

from apart import CLONE_NEWNS, checked, libc, set_apart
from seccomp import Filter

CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
NAMESPACES = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET

PR_SET_DUMPABLE = 4
PR_CAPBSET_READ = 23
PR_CAPBSET_DROP = 24
PR_SET_NO_NEW_PRIVS = 38
CAPABILITY_VERSION_3 = 0x20080522

PACKET_BYTES = 4096
MOST_DESCRIPTORS = 16

Work = Callable[[dict[str, Any]], int]
"""What a process does once it is inside, with its order; returns the exit status."""

confine = Filter()


def prctl(option: int, argument: int) -> int:
    return checked(libc.prctl(option, argument, 0, 0, 0), f"prctl {option}")


def serve(descriptor: int, work: Work) -> None:
    """Fork when the server asks for it, and tell of each end."""
    gc.collect()
    gc.freeze()
    prctl(PR_SET_DUMPABLE, 0)
    server = socket.socket(fileno=descriptor)
    server.send(json.dumps({"loaded": True}).encode())
    children: dict[int, int] = {}
    poll = select.poll()
    poll.register(server, select.POLLIN)
    while True:
        for ready, _ in poll.poll():
            if ready == server.fileno():
                packet, given, _, _ = socket.recv_fds(server, PACKET_BYTES, MOST_DESCRIPTORS)
                if not packet:
                    return
                pid = os.fork()
                if pid == 0:
                    enter(given, work)
                ended = os.pidfd_open(pid)
                children[ended] = pid
                poll.register(ended, select.POLLIN)
                socket.send_fds(server, [json.dumps({"pid": pid}).encode()], [ended])
                for one in given:
                    os.close(one)
            else:
                poll.unregister(ready)
                os.close(ready)
                pid = children.pop(ready)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                server.send(json.dumps({"pid": pid, "code": code}).encode())


def enter(given: list[int], work: Work) -> None:
    """The forked process; it never returns.

    It enters the namespaces, and a child of its own does the work: a process is in the pid
    namespace that its parent had chosen.
    """
    code = 1
    try:
        sandbox, order_file, *standard = given[:5]
        os.setsid()
        with open(order_file, "rb") as file:
            order = json.load(file)
        mounts = given.pop() if order["apart"] else None
        for cgroup in given[5:]:
            os.write(cgroup, b"0")
        for target, descriptor in enumerate(standard):
            os.dup2(descriptor, target)
        os.setns(sandbox, NAMESPACES)
        if mounts is not None:
            os.setns(mounts, CLONE_NEWNS)
        if "secluded" in order:
            set_apart(**order["secluded"])
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        pid = os.fork()
        if pid == 0:
            become(**order["process"])
            code = work(order)
        else:
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            code = code if code >= 0 else 128 - code
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def become(
    uid: int, gid: int, groups: list[int], capabilities: int, env: dict[str, str], cwd: str
) -> None:
    """Take on the ids, the environment and the directory; give up everything else.

    At most the capabilities of the bit mask are kept, and those for root.
    """
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
    os.chdir(cwd)
