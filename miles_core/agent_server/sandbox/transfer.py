"""Files between this host and a sandbox, as tar archives.

They pass through processes inside the sandbox, always: a path that is resolved on the host could
lead through a link of the agent's to a file of the host.
"""

from __future__ import annotations

import io
import os
import tarfile
import tempfile
from pathlib import Path

from harbor.environments.base import transfer_tar_filter

from miles_core.agent_server.sandbox.errors import SandboxError

TRANSFER_LIMIT = 256 << 20
"""Bytes of one file or directory that is read out of a sandbox."""
ENDS = {"test-stdout.txt": 8 << 20}
"""Of what a verifier printed, the last bytes are read."""


def pack(source: Path) -> bytes:
    """A directory of this host as an archive."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.add(source, arcname=".")
    return buffer.getvalue()


def unpack(data: bytes, target: Path) -> None:
    """Unpack what a sandbox packed: no devices, no links, nothing outside of `target`."""
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".incoming-") as incoming:
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            for member in archive:
                if member.issym() or member.islnk():
                    continue
                archive.extract(member, incoming, filter=transfer_tar_filter)
        _merge(Path(incoming), target)


def _merge(source: Path, target: Path) -> None:
    for path in list(source.iterdir()):
        place = target / path.name
        if path.is_dir() and place.is_dir() and not place.is_symlink():
            _merge(path, place)
        else:
            if place.is_dir() and not place.is_symlink():
                raise SandboxError(f"{place.name} is a directory here and a file in the sandbox")
            os.replace(path, place)
