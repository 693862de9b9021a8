"""Folders that only later commands of a sandbox see."""

from __future__ import annotations

import asyncio
import os
import stat

from miles_core.agent_server.sandbox.errors import SandboxError
from miles_core.agent_server.sandbox.forks import Spawner
from miles_core.agent_server.sandbox.streams import pipes

LIMIT_S = 30.0
TEXT_LIMIT = 64 << 10


def text_of(pid: int, path: str) -> str:
    """What is in a file of the sandbox whose first process is `pid`; empty for what is no file of
    at most 64 KiB. No link is followed."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    at = os.open(f"/proc/{pid}/root/", os.O_PATH | os.O_DIRECTORY)
    try:
        *folders, name = path.strip("/").split("/")
        for folder in folders:
            below = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=at)
            os.close(at)
            at = below
        with open(os.open(name, flags, dir_fd=at), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_size > TEXT_LIMIT:
                return ""
            return file.read(TEXT_LIMIT).decode("utf-8", "surrogateescape")
    except OSError:
        return ""
    finally:
        os.close(at)


async def make_mounts(
    spawner: Spawner,
    places: dict[str, int],
    size_mb: int,
    restored: list[str],
    files: dict[str, str],
) -> int:
    """A descriptor of a mount namespace with a tmpfs at each of `places` (`inside/apart.py`:
    set_apart). A process makes them and ends. Raises SandboxError."""
    apart = {"places": places, "size_mb": size_mb, "restored": restored, "files": files}
    order = {"apart": apart}
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
