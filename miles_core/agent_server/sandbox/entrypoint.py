"""The ENTRYPOINT of an image, which a container runs when it starts.

Harbor gives containers the command `sh -c "sleep infinity"` in the place of CMD, so that these are
the arguments of an ENTRYPOINT. Many prepare something and then become what the arguments say.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from miles_core.agent_server.sandbox.accounts import Account
from miles_core.agent_server.sandbox.box import Box
from miles_core.agent_server.sandbox.channel import KILLED
from miles_core.agent_server.sandbox.errors import SandboxError

SLEEP = ["sleep", "infinity"]
COMMAND = ["sh", "-c", " ".join(SLEEP)]
UP_LIMIT_S = 10.0
"""How long one may take until it runs its arguments. A service that never does goes on."""

_SHELLS = frozenset({"sh", "bash", "dash", "ash", "zsh"})


def is_run(entrypoint: list[str]) -> bool:
    """Whether there is one that does something: a shell alone takes the arguments for a script."""
    if not entrypoint:
        return False
    program, *options = entrypoint
    is_shell = program.rpartition("/")[2] in _SHELLS
    return not (is_shell and all(option.startswith("-") for option in options))


async def start(
    box: Box, entrypoint: list[str], env: dict[str, str], workdir: str, user: Account
) -> None:
    """Run an ENTRYPOINT, and wait until it runs its arguments, has ended or `UP_LIMIT_S` are over.

    What it runs then lives as long as the sandbox. Raises SandboxError when it has failed.
    """
    ended = await box.start_program(
        [*entrypoint, *COMMAND],
        env=env,
        cwd=workdir,
        user=user,
        is_up=lambda: any(_is_the_command(pid) for pid, _ in box.members()),
        limit_s=UP_LIMIT_S,
    )
    if ended is not None and ended.code != 0:
        hint = "it was killed; is memory_mb of task.toml enough?"
        said = hint if ended.code == KILLED else " ".join(ended.problem().split())
        words = " ".join(" ".join(entrypoint).split())[:80]
        given = f"with the arguments {shlex.join(COMMAND)}"
        raise SandboxError(f"ENTRYPOINT {words} failed with {ended.code} {given}: {said}")


def _is_the_command(pid: int) -> bool:
    """Whether a process is what the arguments start."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1]
    except OSError:  # it has ended
        return False
    return [word.decode(errors="replace") for word in words] in (SLEEP, COMMAND)
