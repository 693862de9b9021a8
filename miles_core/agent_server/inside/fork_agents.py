"""A process that has the agent's code loaded and forks into sandboxes.

    python -I -S fork_agents.py PACKAGES SOCKET

SOCKET is the descriptor of a sequential-packet socket to the agent server. A packet asks for one
agent and carries descriptors: a pidfd of the sandbox, standard input, output and error, and the
`cgroup.procs` files to join. The answers are JSON: `{"pid"}` with a pidfd of the new process, and
later `{"pid", "code"}`. The end of the socket is the end of this process.
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

CLONE_NEWNS = 0x00020000
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

libc = ctypes.CDLL(None, use_errno=True)


def checked(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def prctl(option: int, argument: int) -> int:
    return checked(libc.prctl(option, argument, 0, 0, 0), f"prctl {option}")


def main() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:0] = [here, sys.argv[1]]
    server = socket.socket(fileno=int(sys.argv[2]))
    import run_agent

    run_agent.load()
    gc.collect()
    gc.freeze()
    prctl(PR_SET_DUMPABLE, 0)
    server.send(json.dumps({"loaded": True}).encode())
    serve(server)


def serve(server: socket.socket) -> None:
    """Fork when asked, and tell of each end."""
    children: dict[int, int] = {}
    poll = select.poll()
    poll.register(server, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor == server.fileno():
                packet, given, _, _ = socket.recv_fds(server, PACKET_BYTES, MOST_DESCRIPTORS)
                if not packet:
                    return
                pid = os.fork()
                if pid == 0:
                    agent(given)
                ended = os.pidfd_open(pid)
                children[ended] = pid
                poll.register(ended, select.POLLIN)
                socket.send_fds(server, [json.dumps({"pid": pid}).encode()], [ended])
                for one in given:
                    os.close(one)
            else:
                poll.unregister(descriptor)
                os.close(descriptor)
                pid = children.pop(descriptor)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                server.send(json.dumps({"pid": pid, "code": code}).encode())


def agent(given: list[int]) -> None:
    """The forked process; it never returns.

    The namespaces are entered here, and a child becomes the agent: a process is in the pid
    namespace that its parent had chosen.
    """
    code = 1
    try:
        sandbox, *standard = given[:4]
        os.setsid()
        for cgroup in given[4:]:
            os.write(cgroup, b"0")
        for target, descriptor in enumerate(standard):
            os.dup2(descriptor, target)
        os.setns(sandbox, NAMESPACES)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        pid = os.fork()
        if pid == 0:
            code = work()
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


def work() -> int:
    """Become the user of the task, in its directory and environment, and run the agent."""
    import run_agent

    order = json.load(sys.stdin)
    process = order["process"]
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    drop_privileges(process["capabilities"], process["uid"], process["gid"], process["groups"])
    prctl(PR_SET_DUMPABLE, 0)
    os.environ.clear()
    os.environ.update(process["env"])
    os.chdir(process["cwd"])
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), sys.stdin.fileno())
    return run_agent.run(order["job"])


def drop_privileges(kept: int, uid: int, gid: int, groups: list[int]) -> None:
    """Take on the ids; keep at most the capabilities of the bit mask `kept`, and those for root."""
    capability = 0
    while libc.prctl(PR_CAPBSET_READ, capability, 0, 0, 0) >= 0:
        if not kept >> capability & 1:
            prctl(PR_CAPBSET_DROP, capability)
        capability += 1
    os.setgroups(groups)
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    held = kept if uid == 0 else 0
    low, high = held & 0xFFFFFFFF, held >> 32
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    data = (ctypes.c_uint32 * 6)(low, low, 0, high, high, 0)
    checked(libc.capset(header, data), "capset")


if __name__ == "__main__":
    main()
