"""Files between this host and a sandbox, as tar archives.

They pass through processes inside the sandbox, always: a path that is resolved on the host could
lead through a link of the agent's to a file of the host. What comes out is bounded here and there,
and is not believed: only files and folders are taken, under names below one folder.
"""

from __future__ import annotations

import io
import os
import shutil
import tarfile
import tempfile
from pathlib import Path, PurePosixPath

from miles_core.agent_server.sandbox.errors import SandboxError

TRANSFER_LIMIT = 256 << 20
"""Bytes of one file or directory that is read out of a sandbox."""
FILES_LIMIT = 10_000
DEPTH_LIMIT = 64
"""Files and folders, and folders in each other, of one directory that is read out."""
LIMITS = [TRANSFER_LIMIT, FILES_LIMIT, DEPTH_LIMIT]
ENDS = {"test-stdout.txt": 8 << 20}
"""Of what a verifier printed, the last bytes are read."""
REWARD_FILES = ("reward.txt", "reward.json")
REWARD_LIMIT = 1 << 20
"""Bytes of a file of rewards, which is read whole."""


def pack(source: Path) -> bytes:
    """A directory of this host as an archive."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.add(source, arcname=".")
    return buffer.getvalue()


def pack_file(source: Path, name: str, mode: int) -> bytes:
    """A file of this host as an archive of one."""
    data = source.read_bytes()
    info = tarfile.TarInfo(name)
    info.mode, info.size, info.mtime = mode, len(data), source.stat().st_mtime
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def unpack(data: bytes, target: Path) -> None:
    """Put the files of an archive from a sandbox into `target`, over those of the same name.

    Links, pipes and devices are left out. Raises SandboxError, tarfile.TarError or OSError, and
    takes nothing then.
    """
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".incoming-") as incoming:
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            _extract(archive, Path(incoming))
        _merge(Path(incoming), target)


def _extract(archive: tarfile.TarFile, target: Path) -> None:
    """There is no link below `target`, so that no name can lead out but by its own parts."""
    total = 0
    for count, member in enumerate(archive, 1):
        place = target.joinpath(*_parts(member.name))
        total += member.size
        if member.size < 0:
            raise SandboxError("an archive of the sandbox is broken")
        if count > FILES_LIMIT or total > TRANSFER_LIMIT:
            size = f"{FILES_LIMIT} files or {TRANSFER_LIMIT >> 20} MiB"
            raise SandboxError(f"a directory of the sandbox has more than {size}")
        if member.isdir():
            place.mkdir(parents=True, exist_ok=True)
        elif member.isreg():
            if place.name in REWARD_FILES and member.size > REWARD_LIMIT:
                raise SandboxError(f"{place.name} has more than {REWARD_LIMIT >> 20} MiB")
            place.parent.mkdir(parents=True, exist_ok=True)
            content = archive.extractfile(member)
            assert content is not None
            with open(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), "wb") as file:
                shutil.copyfileobj(content, file)
            place.chmod(member.mode & 0o755 | 0o600)


def _parts(name: str) -> tuple[str, ...]:
    """The parts of a member's name below the folder that it is unpacked in."""
    parts = tuple(part for part in PurePosixPath(name).parts if part != "/")
    if ".." in parts:
        raise SandboxError(f"an archive of the sandbox leads out of its folder: {name[:100]!r}")
    if len(parts) > DEPTH_LIMIT:
        raise SandboxError(f"a directory of the sandbox is more than {DEPTH_LIMIT} folders deep")
    return parts


def _merge(source: Path, target: Path) -> None:
    for path in list(source.iterdir()):
        place = target / path.name
        if path.is_dir() and place.is_dir() and not place.is_symlink():
            _merge(path, place)
        else:
            if place.is_dir() and not place.is_symlink():
                raise SandboxError(f"{place.name} is a directory here and a file in the sandbox")
            os.replace(path, place)
