"""How a process of this machine ended, also one that is nobody's child here (Linux)."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import struct
import time
from pathlib import Path

# PIDFD_GET_INFO of <linux/pidfd.h>: the kernel keeps the wait status of a process that was reaped
# for who still holds a pidfd, since Linux 6.15.
_INFO = struct.Struct("=QQ11Ii")  # mask, cgroup, eleven ids, wait status
_GET_INFO = 0xC0000000 | _INFO.size << 16 | 0xFF << 8 | 11
_INFO_EXIT = 1 << 3


class ProcessEnd:
    """Holds on to a process by its pidfd, so that its end can be seen and told.

    Raises ProcessLookupError when there is no such process.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)
        self._out_of_memory = _oom_kills()

    def kill(self, within_s: float) -> bool:
        """Send SIGKILL when it has not ended by itself within the time; whether it has ended."""
        if self._ended(within_s):
            return True
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        return self._ended(5.0)

    def _ended(self, within_s: float) -> bool:
        poll = select.poll()  # a pidfd is readable once the process has ended
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(within_s * 1000))

    def status(self, within_s: float = 0.0) -> int | None:
        """Exit status, or minus the signal; None while it lives and where the kernel is older.

        It is known once the parent has taken notice of the end; `within_s` is waited for that.
        """
        deadline = time.monotonic() + within_s
        while True:
            buffer = bytearray(_INFO.pack(_INFO_EXIT, *[0] * 13))
            try:
                fcntl.ioctl(self._pidfd, _GET_INFO, buffer)
            except OSError:
                return None
            mask, *_, status = _INFO.unpack(buffer)
            if mask & _INFO_EXIT:
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.02)

    def state(self) -> str:
        """What `/proc` says it does: "stopped", "in uninterruptible sleep", or ""."""
        names = {"T": "stopped", "t": "stopped by a tracer", "D": "in uninterruptible sleep"}
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return ""
        return names.get(fields[0], "")

    def out_of_memory(self) -> bool:
        """Whether the kernel has killed a process for lack of memory since this one is watched."""
        return _oom_kills() > self._out_of_memory

    def close(self) -> None:
        """Let go of the process."""
        os.close(self._pidfd)


def _oom_kills() -> int:
    """Processes that the kernel's out-of-memory killer has ended, on the whole machine."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def describe(status: int | None) -> str:
    """An exit status in words."""
    if status is None:
        return "has ended"
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"
