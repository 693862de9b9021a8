"""COPY and ADD of a Dockerfile: archives that are made outside and unpacked in the sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import io
import posixpath
import tarfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

from miles_core.agent_server.sandbox import exchange
from miles_core.agent_server.sandbox.box import Box
from miles_core.agent_server.sandbox.context import Context
from miles_core.agent_server.sandbox.errors import SandboxError

SIZE_LIMIT = 1 << 30
"""Bytes that one COPY may copy: they pass through the memory of the agent server."""

COMMAND_LIMIT_S = 300.0

_MAKE = """owner=$1 place=$2; set --
while [ ! -d "$place" ]; do set -- "$place" "$@"; place=$(dirname "$place"); done
for made in "$@"; do mkdir -- "$made" && chown "$owner" "$made" || exit 1; done"""

_UNPACK = (
    'exec tar -xpf - -C "$1" --numeric-owner --same-owner --keep-directory-symlink'
    " --no-overwrite-dir"
)

_EXTRACT = """made=$(mktemp "$1/.add-XXXXXX") && cat > "$made" || exit 1
tar -xpf "$made" -C "$1" --numeric-owner; code=$?; rm -f -- "$made"; exit $code"""

_KIND = '[ -d "$1" ] && echo directory || { [ -e "$1" ] && echo file; }'

_MATCHES = 'compgen -G "$1" | sort'

_PACK_DIRECTORY = 'exec tar -cf - --format=gnu --numeric-owner -C "$1" .'

_PACK_FILE = (
    'file=$(realpath -- "$1") && exec tar -cf - --format=gnu --numeric-owner'
    ' -C "$(dirname "$file")" -- "./$(basename "$file")"'
)

Member = tuple[tarfile.TarInfo, IO[bytes] | Path | None]


@dataclass(frozen=True)
class Given:
    """One source: its own name, and its files as they are to be called.

    `members(name)` are those of a file that becomes `name`, or of a directory's contents below
    `name`, "" being the target directory itself. `file` is a file of the context.
    """

    name: str
    is_directory: bool
    members: Callable[[str], Iterable[Member]]
    file: Path | None = None

    def is_archive(self) -> bool:
        """Whether ADD unpacks it."""
        return self.file is not None and tarfile.is_tarfile(self.file)


async def checked(
    box: Box, script: str, *arguments: str, stdin: bytes | None = None, shell: str = "sh"
) -> bytes:
    """Run a shell script as root that must succeed; its output; raises SandboxError."""
    done = await box.run(
        [shell, "-c", script, "image", *arguments],
        stdin=stdin,
        timeout_s=COMMAND_LIMIT_S,
        limit=SIZE_LIMIT + 1,
    )
    if done.code != 0:
        said = (done.err or done.out).decode(errors="replace").strip()[-300:]
        raise SandboxError(f"a program in the sandbox failed with {done.code}: {said}")
    return done.out


async def is_directory(box: Box, place: str) -> bool:
    return (await checked(box, _KIND + "; true", place)).strip() == b"directory"


async def make_directory(box: Box, place: str, owner: tuple[int, int] = (0, 0)) -> None:
    """Make a directory and its parents; those that are made belong to `owner`."""
    if owner == (0, 0):
        await exchange.make_folder(box, place)
        return
    await checked(box, _MAKE, f"{owner[0]}:{owner[1]}", place)


async def unpack(
    box: Box,
    members: Iterable[Member],
    place: str,
    owner: tuple[int, int] | None,
    mode: int | None,
) -> None:
    """Write members below the directory `place`; raises ValueError when they are too large."""
    data = await asyncio.to_thread(_pack, members, owner, mode)
    await checked(box, _UNPACK, place, stdin=data)


async def extract(box: Box, archive: Path, place: str) -> None:
    """Unpack an archive of the context below the directory `place`."""
    if archive.stat().st_size > SIZE_LIMIT:
        raise ValueError(f"{archive.name} has more than {SIZE_LIMIT >> 20} MiB")
    await checked(box, _EXTRACT, place, stdin=await asyncio.to_thread(archive.read_bytes))


def _pack(members: Iterable[Member], owner: tuple[int, int] | None, mode: int | None) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(
        fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT, errors="surrogateescape"
    ) as archive:
        for info, data in members:
            if buffer.tell() + info.size > SIZE_LIMIT:
                raise ValueError(f"it copies more than {SIZE_LIMIT >> 20} MiB")
            if owner is not None:
                info.uid, info.gid = owner
            if mode is not None and not info.issym():
                info.mode = mode
            info.uname = info.gname = ""
            with contextlib.ExitStack() as stack:
                file = stack.enter_context(data.open("rb")) if isinstance(data, Path) else data
                archive.addfile(info, file)
    return buffer.getvalue()


def of_text(name: str, text: str) -> Given:
    """A heredoc as a file."""
    data = text.encode("utf-8", "surrogateescape")

    def members(target: str) -> Iterable[Member]:
        info = tarfile.TarInfo(target)
        info.size, info.mode = len(data), 0o644
        return [(info, io.BytesIO(data))]

    return Given(name, False, members)


def of_context(context: Context, pattern: str) -> list[Given]:
    """What a source names in the context; raises ValueError when there is nothing."""
    found = context.find(pattern)
    if not found:
        raise ValueError(f"{pattern!r} does not exist in the build context")
    given = []
    for path, name in found:
        directory = context.is_directory(path)
        file = None if directory else context.root / path
        given.append(Given(name, directory, partial(context.members, path), file))
    return given


async def of_stage(box: Box, pattern: str) -> list[Given]:
    """What a source names in another stage; raises ValueError when there is nothing."""
    place = posixpath.join("/", pattern)
    places = [place]
    if any(mark in place for mark in "*?["):
        listed = await checked(box, _MATCHES, place, shell="bash")
        places = listed.decode("utf-8", "surrogateescape").splitlines()
    given = []
    for one in places:
        kind = (await checked(box, _KIND + "; true", one)).strip()
        if kind:
            directory = kind == b"directory"
            data = await checked(box, _PACK_DIRECTORY if directory else _PACK_FILE, one)
            members = partial(_renamed, data, directory)
            given.append(Given(posixpath.basename(one.rstrip("/")), directory, members))
    if not given:
        raise ValueError(f"{pattern!r} does not exist in that stage")
    return given


def _renamed(data: bytes, directory: bool, target: str) -> Iterator[Member]:
    """The members of an archive of another stage, at their new place."""

    def renamed(name: str) -> str:
        below = posixpath.normpath(name) if directory else ""
        return posixpath.join(target, below) if below else target

    with tarfile.open(fileobj=io.BytesIO(data), errors="surrogateescape") as archive:
        for info in archive:
            if directory and posixpath.normpath(info.name) == ".":
                continue
            content = archive.extractfile(info) if info.isreg() else None
            info.name = renamed(info.name)
            if info.islnk():
                info.linkname = renamed(info.linkname)
            info.pax_headers = {}
            yield info, content
