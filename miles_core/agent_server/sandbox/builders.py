"""Real images: a root file system from a Dockerfile, by buildah or podman.

Both build without a daemon and, with chroot isolation, without cgroups or an OCI runtime. A RUN
has the host's network then, as in every image build. Images that are in the builder's own storage
are found there.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from miles_core.agent_server.sandbox.build import ImageState, state_of
from miles_core.agent_server.sandbox.errors import SandboxError, SandboxUnsupported
from miles_core.agent_server.sandbox.lookups import RESOLV_CONF

CALL_LIMIT_S = 1800
END_LIMIT_S = 10

LOGS = ("logs/agent", "logs/verifier", "logs/artifacts")

NEEDED = ("bash", "sh", "cat", "mkdir", "chmod", "dirname", "tar")
"""Programs that Harbor's commands and the transfer of files need in an image."""

_MOUNTED = ("dev", "proc", "etc", *LOGS)
"""Directories of a sandbox that must be ones; of the others a link of the image may stay."""

_MADE = {"root": 0o700, "tmp": 0o1777, "var/tmp": 0o1777}
_NAME = "localhost/miles-agent-image"
_PATH = ("usr/local/sbin", "usr/local/bin", "usr/sbin", "usr/bin", "sbin", "bin")
_LINKS_LIMIT = 20


def missing(program: str) -> bool:
    """Whether a builder is not on the PATH."""
    return shutil.which(program) is None


class Builder:
    """One builder program.

    Its images have a name of ours only until they are exported. What has another name stays, and
    so does what images were built upon, in the builder's storage.
    """

    def __init__(self, program: str) -> None:
        self.program = program

    async def build(
        self, dockerfile: bytes, context: Path | None, target: Path, tag: str
    ) -> ImageState:
        """Build an image and make `target` its root file system.

        `tag` is unlike that of any other build. `context` is None when nothing is copied. Raises
        SandboxError with what the builder said, and SandboxUnsupported for an image in which Harbor
        could run nothing.
        """
        image = f"{_NAME}:{tag}"
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".context-") as scratch:
            file, empty = Path(scratch, "Dockerfile"), Path(scratch, "empty")
            file.write_bytes(dockerfile)
            empty.mkdir()
            await self._call(
                *["build", "--isolation", "chroot", "--layers", "--force-rm"],
                *["--tag", image, "-f", str(file), str(context or empty)],
            )
        try:
            state = state_of(await self._config(image))
            await self._export(image, target)
        finally:
            await self._call("rmi", image)
        await asyncio.to_thread(_prepare, target)
        return state

    async def _config(self, image: str) -> dict[str, Any]:
        if self.program == "buildah":
            found = json.loads(await self._call("inspect", "--type", "image", image))
            return dict(found["OCIv1"].get("config") or {})
        found = json.loads(await self._call("image", "inspect", image))
        return dict(found[0].get("Config") or {})

    async def _export(self, image: str, target: Path) -> None:
        target.mkdir()
        if self.program == "podman":
            mounted = (await self._call("image", "mount", image)).decode().strip()
            try:
                await run("cp", "-a", f"{mounted}/.", str(target))
            finally:
                await self._call("image", "unmount", image)
            return
        container = (await self._call("from", "--pull-never", image)).decode().strip()
        try:
            mounted = (await self._call("mount", container)).decode().strip()
            await run("cp", "-a", f"{mounted}/.", str(target))
        finally:
            await self._call("rm", container)

    async def _call(self, *arguments: str) -> bytes:
        return await run(self.program, *arguments)


async def run(*argv: str) -> bytes:
    """Run a program of the host that must succeed; its output; raises SandboxError.

    When this call is cancelled, the program is asked to end and cleans up after itself, and is
    killed if it does not. The same happens when this process dies, and after `CALL_LIMIT_S`.
    """
    process = await asyncio.create_subprocess_exec(
        *["setpriv", "--pdeathsig", "TERM"],
        *["timeout", f"--kill-after={END_LIMIT_S}", str(CALL_LIMIT_S), *argv],
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        out, err = await process.communicate()
    except asyncio.CancelledError:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()
        raise
    if process.returncode != 0:
        said = " ".join((err or out).decode(errors="replace").split())[-400:]
        raise SandboxError(f"{argv[0]} {argv[1]} failed with {process.returncode}: {said}")
    return out


def _prepare(root: Path) -> None:
    """Give a foreign root what a sandbox has in it; no link of the image is ever followed."""
    lacking = [name for name in NEEDED if not _has_program(root, name)]
    if lacking:
        raise SandboxUnsupported(
            f"the image has no {', '.join(lacking)}, which every trial needs; install it there"
        )
    for name in _MOUNTED:
        place = root
        for part in Path(name).parts:
            place = place / part
            if place.is_symlink() or (place.exists() and not place.is_dir()):
                raise SandboxUnsupported(f"/{place.relative_to(root)} of the image is no directory")
            place.mkdir(exist_ok=True)
        if name in LOGS:
            place.chmod(0o777)
    for name, mode in _MADE.items():
        place = root / name
        linked = any(part.is_symlink() for part in (place, place.parent) if part != root)
        if not linked and not place.exists():
            place.mkdir(parents=True)
            place.chmod(mode)
    for name, text in (
        ("resolv.conf", RESOLV_CONF),
        ("hosts", "127.0.0.1 localhost sandbox\n"),
        ("hostname", "sandbox\n"),
    ):
        file = root / "etc" / name
        file.unlink(missing_ok=True)
        file.write_text(text)


def _has_program(root: Path, name: str) -> bool:
    return any(_exists(root, f"{directory}/{name}") for directory in _PATH)


def _exists(root: Path, path: str) -> bool:
    """Whether a path exists in a root file system, its links followed as from inside."""
    left, place = [part for part in path.split("/") if part], root
    links = 0
    while left:
        part = left.pop(0)
        if part == "..":
            place = place.parent if place != root else root
            continue
        if part == ".":
            continue
        step = place / part
        if step.is_symlink():
            links += 1
            if links > _LINKS_LIMIT:
                return False
            to = os.readlink(step)
            left = [piece for piece in to.split("/") if piece] + left
            place = root if to.startswith("/") else place
            continue
        if not step.exists():
            return False
        place = step
    return True
