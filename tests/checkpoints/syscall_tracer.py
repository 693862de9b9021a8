"""Stop a process at a chosen change of the file system, with ptrace (Linux on x86-64).

A `Tracer` names every system call of a process that changes files below a folder, and can kill the
process with SIGKILL right before or right after one of them. The traced program knows nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

SUPPORTED = sys.platform == "linux" and platform.machine() == "x86_64"

_SYSCALL, _CONT, _SEIZE, _INTERRUPT, _SYSCALL_INFO = 24, 7, 0x4206, 0x4207, 0x420E
_OPTIONS = 0x1 | 0x8 | 0x100000  # mark system calls, follow threads, die with the tracer
_WALL = 0x40000000
_ENTRY, _EXIT = 1, 2
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

# number -> (name, kind of arguments)
_CALLS = {
    1: ("write", "fd"),
    18: ("write", "fd"),
    20: ("write", "fd"),
    40: ("write", "fd"),
    326: ("write", "third"),
    74: ("fsync", "fd"),
    75: ("fsync", "fd"),
    257: ("open", "open"),
    82: ("rename", "two"),
    264: ("rename", "two at"),
    316: ("rename", "two at"),
    83: ("mkdir", "path"),
    84: ("rmdir", "path"),
    87: ("unlink", "path"),
    263: ("unlink", "at"),
}


class _Info(ctypes.Structure):
    _fields_ = [
        ("op", ctypes.c_uint8),
        ("pad", ctypes.c_uint8 * 3),
        ("arch", ctypes.c_uint32),
        ("ip", ctypes.c_uint64),
        ("sp", ctypes.c_uint64),
        ("nr", ctypes.c_uint64),
        ("args", ctypes.c_uint64 * 6),
        ("more", ctypes.c_uint64 * 4),
    ]


_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.restype = ctypes.c_long
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


def _ptrace(request: int, tid: int, address: int = 0, data: int = 0) -> int:
    answer = int(_libc.ptrace(request, tid, address, data))
    if answer < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return answer


@dataclass(frozen=True)
class Point:
    """The `number`-th call of this `name` (from 0); `after`: once it is done, else before it."""

    name: str
    number: int
    after: bool = False

    def __str__(self) -> str:
        return f"{'after' if self.after else 'before'} {self.name} #{self.number}"


@dataclass
class Tracer:
    """Follows process `pid` from `attach` to its end; `events` are the names in order."""

    pid: int
    root: Path
    kill_at: Point | None = None
    events: list[str] = field(default_factory=list)
    killed: bool = False

    def attach(self) -> None:
        """Take hold of all threads; the process waits for something in a system call."""
        self._seen: Counter[str] = Counter()
        self._pending: dict[int, bool] = {}
        self._memory = os.open(f"/proc/{self.pid}/mem", os.O_RDONLY)
        for task in os.listdir(f"/proc/{self.pid}/task"):
            with contextlib.suppress(ProcessLookupError):  # it ended since it was listed
                _ptrace(_SEIZE, int(task), 0, _OPTIONS)
                _ptrace(_INTERRUPT, int(task))

    def follow(self) -> int:
        """Let it run to its end; the status that waitpid gives."""
        try:
            while True:
                tid, status = os.waitpid(-1, _WALL)
                if os.WIFSTOPPED(status):
                    # A thread that stands still here can be gone a moment later, when the whole
                    # process ends; what waitpid says next tells it.
                    with contextlib.suppress(ProcessLookupError):
                        self._stopped(tid, status)
                elif tid == self.pid:
                    return status
        finally:
            os.close(self._memory)

    def _stopped(self, tid: int, status: int) -> None:
        deliver = 0
        stop = os.WSTOPSIG(status)
        if stop == signal.SIGTRAP | 0x80:
            self._system_call(tid)
        elif status >> 16 == 0 and stop != signal.SIGTRAP:
            deliver = stop
        if not self.killed:
            _ptrace(_SYSCALL, tid, 0, deliver)

    def _system_call(self, tid: int) -> None:
        info = _Info()
        _ptrace(_SYSCALL_INFO, tid, ctypes.sizeof(info), ctypes.addressof(info))
        if info.op == _EXIT and self._pending.pop(tid, False):
            self._kill()
        if info.op != _ENTRY or info.nr not in _CALLS:
            return
        name = self._name(*_CALLS[info.nr], list(info.args))
        if name is None:
            return
        self.events.append(name)
        number = self._seen[name]
        self._seen[name] += 1
        if self.kill_at is not None and (self.kill_at.name, self.kill_at.number) == (name, number):
            if self.kill_at.after:
                self._pending[tid] = True
            else:
                self._kill()

    def _kill(self) -> None:
        self.killed = True
        os.kill(self.pid, signal.SIGKILL)

    def _name(self, call: str, kind: str, args: list[int]) -> str | None:
        if kind == "open" and not args[2] & _WRITING:
            return None
        names = [self._below_root(path) for path in self._paths(kind, args)]
        if None in names:
            return None
        return f"{call} {' -> '.join(n for n in names if n is not None)}"

    def _paths(self, kind: str, args: list[int]) -> Iterator[str]:
        if kind in ("fd", "third"):
            yield self._descriptor(args[2 if kind == "third" else 0])
        elif kind in ("path", "two"):
            yield from (self._text(address) for address in args[: 1 if kind == "path" else 2])
        else:
            for i in (0, 2) if kind == "two at" else (0,):
                text = self._text(args[i + 1])
                relative = not text.startswith("/") and args[i] < 1 << 31
                yield f"{self._descriptor(args[i])}/{text}" if relative else text

    def _descriptor(self, number: int) -> str:
        try:
            return os.readlink(f"/proc/{self.pid}/fd/{number}")
        except OSError:
            return ""

    def _text(self, address: int) -> str:
        return os.pread(self._memory, 4096, address).split(b"\0", 1)[0].decode()

    def _below_root(self, path: str) -> str | None:
        """The path below the root without random parts of names."""
        try:
            relative = Path(path).relative_to(self.root).as_posix()
        except ValueError:
            return None
        return re.sub(r"-[0-9a-f]{8}(?=/|$)", "", relative)
