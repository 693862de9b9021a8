"""Folders that only later commands of a sandbox see."""

from __future__ import annotations

import asyncio
import os

from miles_core.agent_server.sandbox.errors import SandboxError
from miles_core.agent_server.sandbox.forks import Spawner
from miles_core.agent_server.sandbox.streams import pipes

LIMIT_S = 30.0


async def make_mounts(
    spawner: Spawner, places: dict[str, int], size_mb: int, restored: list[str]
) -> int:
    """A descriptor of a mount namespace with a tmpfs at each of `places` (`inside/enter.py`:
    set_apart). A process makes them and ends. Raises SandboxError."""
    order = {"apart": {"places": places, "size_mb": size_mb, "restored": restored}}
    try:
        async with asyncio.timeout(LIMIT_S), pipes(True) as (streams, standard):
            fork = await spawner.fork(order, standard)
            try:
                if await streams.stdout.readline() != b"ready\n":
                    message = (await streams.stderr.read()).decode(errors="replace").strip()
                    raise SandboxError(f"nothing was secluded: {message[-300:]}")
                mounts = os.open(f"/proc/{fork.pid}/ns/mnt", os.O_RDONLY)
                streams.stdin.close()
                try:
                    await fork.ended
                except BaseException:
                    os.close(mounts)
                    raise
                return mounts
            finally:
                fork.end()
    except TimeoutError as error:
        raise SandboxError("the sandbox does not let a process of ours run") from error
