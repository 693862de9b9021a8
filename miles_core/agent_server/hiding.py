"""Taking the secrets of a request out of what its trial left.

An agent has to know the address of its session, which holds a secret, and may write it anywhere:
into its log, a message, an exception. When a trial has ended, each such place is written over.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from pathlib import Path
from urllib.parse import urlsplit

from miles_core.agent_server.protocol import TrialRequest, TrialResult

SHORTEST = 16
"""Characters of what is taken for a secret: a session's id has at least 22."""
MOST_FILES = 20_000
"""Files of one trial that are looked through."""
MOST_BYTES = 1 << 30
CHUNK = 1 << 20
_KEY = re.compile(r"(?i)(api[-_]?key|authorization|secret|password|passwd|_token$|^token$)")
_FILE = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def is_secret_key(name: str) -> bool:
    """Whether a field of this name holds a secret."""
    return _KEY.search(name) is not None


def secrets_of(request: TrialRequest) -> list[str]:
    """What is secret in a request: in its address, and in metadata of a telling name."""
    url = urlsplit(request.base_url or "")
    found = [*url.path.split("/"), url.password or "", url.query]
    found += [
        value
        for name, value in (request.model_extra or {}).items()
        if is_secret_key(name) and isinstance(value, str)
    ]
    return sorted({one for one in found if len(one) >= SHORTEST}, key=len, reverse=True)


def without(result: TrialResult, secrets: list[str]) -> TrialResult:
    """A result in which each secret is as many stars."""
    text = result.model_dump_json()
    if not any(secret in text for secret in secrets):
        return result
    for secret in secrets:
        text = text.replace(secret, "*" * len(secret))
    return TrialResult.model_validate_json(text)


def hide(directory: Path, secrets: list[str]) -> None:
    """Write stars over each secret in the files below a directory; no link is followed."""
    if not secrets or not directory.is_dir():
        return
    files, size = 0, 0
    for _, _, names, place in os.fwalk(directory, follow_symlinks=False):
        for name in names:
            files += 1
            if files > MOST_FILES or size > MOST_BYTES:
                return
            with contextlib.suppress(OSError):  # what is gone, or cannot be opened
                if stat.S_ISREG(os.stat(name, dir_fd=place, follow_symlinks=False).st_mode):
                    size += _hide_in(os.open(name, _FILE, dir_fd=place), secrets)


def _hide_in(descriptor: int, secrets: list[str]) -> int:
    """Write over secrets in one open file, which is closed; the bytes that were read."""
    overlap = max(len(secret.encode()) for secret in secrets) - 1
    at = 0
    try:
        while chunk := os.pread(descriptor, CHUNK, at):
            for secret in secrets:
                word, found = secret.encode(), 0
                while (found := chunk.find(word, found)) >= 0:
                    os.pwrite(descriptor, b"*" * len(word), at + found)
                    found += len(word)
            if len(chunk) < CHUNK or at > MOST_BYTES:
                return at + len(chunk)
            at += CHUNK - overlap
        return at
    finally:
        os.close(descriptor)
