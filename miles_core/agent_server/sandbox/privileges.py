"""What a process in a sandbox takes on (`inside/enter.py`: become), and what it may do."""

from __future__ import annotations

from typing import Any

from miles_core.agent_server.sandbox.accounts import Account

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

CAPABILITIES = {
    "CHOWN": 0,
    "DAC_OVERRIDE": 1,
    "FOWNER": 3,
    "FSETID": 4,
    "KILL": 5,
    "SETGID": 6,
    "SETUID": 7,
    "NET_BIND_SERVICE": 10,
    "SYS_CHROOT": 18,
    "SETFCAP": 31,
}
"""What root of a sandbox may do inside it, with the kernel's numbers (linux/capability.h)."""
FIRST_ALONE = ("WAKE_ALARM", "BLOCK_SUSPEND")
"""Further capabilities of the first process, which mean nothing in a user namespace. Who has fewer
cannot trace it (ptrace(2), access mode checking); it has no filter of system calls."""
BLOCK_SUSPEND = 36
"""One of these is also what sets the verifier's processes above the agent's."""


def taken_on(user: Account, env: dict[str, str], cwd: str, above: bool) -> dict[str, Any]:
    """Ids, environment, directory and capabilities of a process; `above` earlier ones or not."""
    numbers = [*CAPABILITIES.values(), *([BLOCK_SUSPEND] if above else [])]
    return {
        "env": {"PATH": PATH, "LANG": "C.UTF-8", **env},
        "cwd": cwd,
        "uid": user.uid,
        "gid": user.gid,
        "groups": user.groups,
        "capabilities": sum(1 << number for number in numbers),
    }
