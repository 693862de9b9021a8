"""The system calls that a sandbox refuses, as a seccomp filter (classic BPF, seccomp(2)).

What containers refuse by custom: mounts and namespaces, kernel modules and keys, clocks, tracing of
the kernel, and sockets that no network namespace confines, such as those to a hypervisor.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from dataclasses import dataclass

PR_GET_SECCOMP = 21
PR_SET_SECCOMP = 22
SECCOMP_MODE_FILTER = 2
ALLOW = 0x7FFF0000
ERRNO = 0x00050000

LOAD, EQUAL, ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
X32 = 0x40000000

NEW_NAMESPACES = 0x7E020080
"""CLONE_NEW{TIME,NS,CGROUP,UTS,IPC,USER,PID,NET}."""
FAMILIES = (0, 1, 2, 10, 16)
"""AF_UNSPEC, AF_UNIX, AF_INET, AF_INET6, AF_NETLINK."""


@dataclass(frozen=True)
class Machine:
    """Numbers of one architecture; `refused` has what is answered with EPERM."""

    audit: int
    clone: int
    unshare: int
    socket: int
    refused: tuple[int, ...]


_SINCE_424 = (428, 429, 430, 431, 432, 433, 442, 443)  # new mount interface, quotactl_fd
_CLONE3 = 435
_IO_URING = (425, 426, 427)

MACHINES = {
    "x86_64": Machine(
        audit=0xC000003E,
        clone=56,
        unshare=272,
        socket=41,
        refused=(
            *(103, 134, 136, 139, 153, 155, 156, 163, 164, 165, 166, 167, 168, 169, 170, 171),
            *(172, 173, 174, 175, 176, 177, 178, 179, 180, 212, 227, 246, 248, 249, 250, 298),
            *(303, 304, 305, 308, 312, 313, 320, 321, 323),
        ),
    ),
    "aarch64": Machine(
        audit=0xC00000B7,
        clone=220,
        unshare=97,
        socket=198,
        refused=(
            *(18, 39, 40, 41, 42, 58, 60, 89, 104, 105, 106, 112, 116, 142, 161, 162, 170, 217),
            *(218, 219, 224, 225, 241, 264, 265, 266, 268, 272, 273, 280, 282, 294),
        ),
    ),
}
"""From the kernel's own tables: syslog to userfaultfd in the order of the numbers."""


def missing() -> str | None:
    """Why there is no filter on this host, or None when there is one."""
    machine = os.uname().machine
    if machine not in MACHINES:
        return f"no table for {machine}"
    if ctypes.CDLL(None).prctl(PR_GET_SECCOMP, 0, 0, 0, 0) < 0:
        return "the kernel has no seccomp"
    return None


def program(machine: Machine) -> bytes:
    """The filter as an array of struct sock_filter."""
    code: list[bytes] = []

    def add(operation: int, value: int, yes: int = 0, no: int = 0) -> None:
        code.append(struct.pack("=HBBI", operation, yes, no, value))

    def refuse(number: int, error: int) -> None:
        add(EQUAL, number, 0, 1)
        add(RETURN, ERRNO | error)

    add(LOAD, ARCHITECTURE)
    add(EQUAL, machine.audit, 1, 0)
    add(RETURN, ERRNO | errno.ENOSYS)
    add(LOAD, NUMBER)
    add(ANY_BIT, X32, 0, 1)
    add(RETURN, ERRNO | errno.ENOSYS)
    for number in (*machine.refused, *_SINCE_424):
        refuse(number, errno.EPERM)
    # These have an older form, which a library falls back to; clone3's flags are out of reach.
    for number in (_CLONE3, *_IO_URING):
        refuse(number, errno.ENOSYS)
    for number in (machine.clone, machine.unshare):
        add(EQUAL, number, 0, 4)
        add(LOAD, FIRST_ARGUMENT)
        add(ANY_BIT, NEW_NAMESPACES, 0, 1)
        add(RETURN, ERRNO | errno.EPERM)
        add(RETURN, ALLOW)
    add(EQUAL, machine.socket, 1, 0)
    add(RETURN, ALLOW)
    add(LOAD, FIRST_ARGUMENT)
    for left, family in enumerate(reversed(FAMILIES), 1):
        add(EQUAL, family, len(FAMILIES) - left + 1, 0)
    add(RETURN, ERRNO | errno.EAFNOSUPPORT)
    add(RETURN, ALLOW)
    return b"".join(code)


class Filter:
    """The filter of this host's architecture, ready to be installed by a forked process."""

    def __init__(self) -> None:
        self._code: ctypes.Array[ctypes.c_char] | None = None
        if missing() is None:
            data = program(MACHINES[os.uname().machine])
            self._code = ctypes.create_string_buffer(data, len(data))
            address = ctypes.addressof(self._code)
            header = struct.pack("@HP", len(data) // 8, address)
            self._header = ctypes.create_string_buffer(header, len(header))

    def install(self, libc: ctypes.CDLL) -> None:
        """Confine this process and all that come from it; needs no_new_privs. Raises OSError."""
        if self._code is None:
            return
        where = ctypes.c_void_p(ctypes.addressof(self._header))
        mode = ctypes.c_ulong(SECCOMP_MODE_FILTER)
        if libc.prctl(PR_SET_SECCOMP, mode, where, 0, 0) != 0:
            code = ctypes.get_errno()
            raise OSError(code, f"seccomp: {os.strerror(code)}")
