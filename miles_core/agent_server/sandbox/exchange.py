"""Files and folders into a sandbox and out of it, through processes inside (`transfer`)."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path, PurePosixPath
from typing import Any

from miles_core.agent_server.sandbox import transfer
from miles_core.agent_server.sandbox.accounts import Account
from miles_core.agent_server.sandbox.box import Box
from miles_core.agent_server.sandbox.channel import KILLED
from miles_core.agent_server.sandbox.errors import SandboxError
from miles_core.agent_server.sandbox.streams import Completed

TIMEOUT_S = 120.0
KIND_TIMEOUT_S = 10.0


async def make_folder(box: Box, place: str) -> None:
    """Make a folder with its parents where there is none, as root; raises SandboxError."""
    done = await box.files({"make": [place]}, timeout_s=TIMEOUT_S)
    _check(done, f"making {place}")


async def is_folder(box: Box, place: str, user: Account) -> bool:
    """Whether there is a folder, as far as a user sees."""
    done = await box.files({"is_folder": place}, user=user, timeout_s=KIND_TIMEOUT_S)
    return done.code == 0


async def put_folder(box: Box, source: Path, place: str) -> None:
    """Write what is in a folder of this host to one of the sandbox; raises SandboxError."""
    await _unpack(box, await asyncio.to_thread(transfer.pack, source), place)


async def put_file(box: Box, source: Path, place: str) -> None:
    """Write a file; it can be executed there by all if it can be by us. Raises SandboxError."""
    mode = 0o755 if os.access(source, os.X_OK) else 0o644
    target = PurePosixPath(place)
    archive = await asyncio.to_thread(transfer.pack_file, source, target.name, mode)
    await _unpack(box, archive, str(target.parent))


async def _unpack(box: Box, archive: bytes, place: str) -> None:
    done = await box.files({"unpack": place}, stdin=archive, timeout_s=TIMEOUT_S)
    _check(done, f"writing to {place}")


async def get_folder(box: Box, place: str, target: Path) -> None:
    """Write what is in a folder of the sandbox to one of this host.

    Raises FileNotFoundError for what is not there, and SandboxError beyond the limits.
    """
    order = {"pack": place, "ends": transfer.ENDS, "limits": transfer.LIMITS}
    data = await _read(box, order, place)
    await asyncio.to_thread(transfer.unpack, data, target)


async def get_file(box: Box, place: str, target: Path) -> None:
    """The same for a file."""
    data = await _read(box, {"read": place, "size": transfer.TRANSFER_LIMIT}, place)
    target.parent.mkdir(parents=True, exist_ok=True)
    await asyncio.to_thread(target.write_bytes, data)


async def _read(box: Box, order: dict[str, Any], place: str) -> bytes:
    limit = transfer.TRANSFER_LIMIT
    done = await box.files(order, timeout_s=TIMEOUT_S, limit=limit + 1)
    if done.code != 0:
        raise FileNotFoundError(done.problem())
    if len(done.out) > limit:
        raise SandboxError(f"{place}: more than {limit >> 20} MiB")
    return done.out


def _check(done: Completed, what: str) -> None:
    if done.code != 0:
        hint = "it was killed; is memory_mb of task.toml enough?"
        said = hint if done.code == KILLED else done.problem()
        raise SandboxError(f"{what} failed with {done.code}: {said}")
