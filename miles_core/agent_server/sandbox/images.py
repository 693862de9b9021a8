"""What the root of a task's sandbox is, and the cache of what was built for it.

An image is kept in `DIRECTORY/DIGEST`: `image.json` and either `root` and `usr`, layers above those
of the host's own system, or `root` alone, a whole file system. The digest is that of the
Dockerfile, the build context and what it is built upon. An image appears there whole or not at all,
and is never changed: its directory's time says when it was used last.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

from miles_core.agent_server.sandbox import dockerfile, layers
from miles_core.agent_server.sandbox.box import Box
from miles_core.agent_server.sandbox.build import HostBuild, ImageState, Workplace, platform
from miles_core.agent_server.sandbox.builders import Builder, missing
from miles_core.agent_server.sandbox.context import Context
from miles_core.agent_server.sandbox.dockerfile import Dockerfile
from miles_core.agent_server.sandbox.errors import OutOfMemory, SandboxError, SandboxUnsupported
from miles_core.agent_server.sandbox.layers import Root
from miles_core.agent_server.sandbox.system import make_base
from miles_core.agent_server.tasks import NETWORK_COMMANDS
from miles_core.errors import UserError

FORMAT = "2"
"""Of what is kept: a directory of another one is never found."""
BUILD_LIMIT_S = 1800.0
"""The most seconds of one build; it goes on when the trial that began it has ended."""

NewBox = Callable[[str, Root, Callable[[str, bool], None]], Awaitable[Box]]
"""Starts the sandbox of a build: its name, its root, and what is told of each public name."""

_SYSTEM_FILES = ("/etc/os-release", "/var/lib/dpkg/status", "/lib/apk/db/installed")
_SYSTEM_DIRECTORIES = ("bin", "sbin", "lib", "lib64", "share", "local/bin", "local/lib")


@dataclass(frozen=True)
class Image:
    """The root of a sandbox. With `state` None the Dockerfile is still to be followed in it."""

    root: Root
    state: ImageState | None
    digest: str | None = None


class Recipe:
    """What a task says about its image: its Dockerfile with the context, or an image's name."""

    def __init__(self, directory: Path, image: str | None) -> None:
        self.context = Context(directory)
        data = self.context.dockerfile
        self.buildable = data is not None
        """Whether there is a context to build with."""
        if data is None and image is not None:
            data = f"FROM {image}\n".encode()
        self.data = data
        self.file: Dockerfile | None = None if data is None else dockerfile.read(data, platform())

    def works(self) -> bool:
        """Whether following the Dockerfile makes more than a working directory."""
        if self.file is None:
            return False
        used = [self.file.stages[number] for number in self.file.chain(len(self.file.stages) - 1)]
        return any(made.name in dockerfile.WORKING for stage in used for made in stage.instructions)

    def foreign(self, builder: bool) -> str | None:
        """Why the host's own system cannot stand in for the images named, or None.

        With a builder, commands that fetch from the internet are a reason too.
        """
        if self.file is None:
            return None
        for number, stage in enumerate(self.file.stages):
            image, origin = self.file.root_image(number)
            if not dockerfile.stands_in(image, builder):
                where = origin.where() if self.buildable else "task.toml: docker_image"
                return f"{where}: the host's own system cannot stand in for {image!r}"
            for made in stage.instructions:
                text = made.text + made.raw_heredocs
                if builder and made.name == "RUN" and NETWORK_COMMANDS.search(text):
                    return f"{made.where()}: it needs the network"
        return None

    def digest(self, base: str) -> str:
        total = hashlib.sha256()
        context = self.context.digest() if self.buildable else ""
        for part in (FORMAT.encode(), base.encode(), self.data or b"", context.encode()):
            total.update(b"%d " % len(part) + part)
        return total.hexdigest()


class Images:
    """The images of one agent server; `builder` is None where only the host's system is used."""

    def __init__(
        self, directory: Path, base: Path, builder: Builder | None, limit_bytes: int
    ) -> None:
        self.base = Root((base,), (Path("/usr"),))
        self._directory = directory
        self._builder = builder
        self._limit = limit_bytes
        self._held: Counter[str] = Counter()
        self._building: dict[str, asyncio.Task[None]] = {}
        self._builds = 0
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.chmod(0o700)  # files in it may be setuid
        for left in directory.glob(".*"):
            layers.remove(left)
        for gone in self._shrink():
            layers.remove(gone)
        self._keeps = layers.can_keep(directory)

    async def take(self, recipe: Recipe, new_box: NewBox) -> Image:
        """The image of a task, built if it is not there; `release` must follow.

        Raises DockerfileInvalid, SandboxUnsupported and SandboxError.
        """
        problem = recipe.foreign(self._builder is not None)
        if problem and self._builder is None:
            raise SandboxUnsupported(f"{problem}; {_ADVICE}")
        if problem is None and not (recipe.works() and self._keeps):
            return Image(self.base, None)
        digest = await asyncio.to_thread(recipe.digest, self._identity)
        self._held[digest] += 1
        try:
            while (image := self._found(digest)) is None:
                await self._wait(digest, recipe, new_box, problem)
        except BaseException:
            self._held[digest] -= 1
            raise
        return image

    def release(self, image: Image) -> None:
        """A sandbox no longer has this image."""
        if image.digest is not None:
            self._held[image.digest] -= 1

    async def follow(self, recipe: Recipe, place: Workplace, new_box: NewBox) -> ImageState:
        """Follow a Dockerfile in the sandbox of a trial itself."""
        if recipe.file is None:
            return ImageState()
        build = HostBuild(recipe.file, recipe.context, self._opener(new_box, "stage"))
        try:
            return await build.follow(place)
        except SandboxUnsupported as error:
            raise SandboxUnsupported(f"{error}; {_ADVICE}") from None

    @cached_property
    def _identity(self) -> str:
        """What all images are built upon."""
        if self._builder is not None:
            return f"{self._builder.program} {_host_identity(self.base.layers[0])}"
        return _host_identity(self.base.layers[0])

    def _found(self, digest: str) -> Image | None:
        place = self._directory / digest
        try:
            told = json.loads((place / "image.json").read_bytes())
            os.utime(place)
        except FileNotFoundError:
            return None
        state = ImageState(**told["state"])
        if told["whole"]:
            return Image(Root((place / "root",)), state, digest)
        return Image(self.base.over(place / "root", place / "usr"), state, digest)

    async def _wait(
        self, digest: str, recipe: Recipe, new_box: NewBox, problem: str | None
    ) -> None:
        """Wait for the build of an image, which this call begins if nobody has."""
        building = self._building.get(digest)
        if building is None:
            building = asyncio.create_task(self._build(digest, recipe, new_box, problem))
            self._building[digest] = building
            building.add_done_callback(lambda task: self._built(digest, task))
        await asyncio.shield(building)

    def _built(self, digest: str, task: asyncio.Task[None]) -> None:
        del self._building[digest]
        if not task.cancelled():
            task.exception()  # nobody may be waiting any more

    async def _build(
        self, digest: str, recipe: Recipe, new_box: NewBox, problem: str | None
    ) -> None:
        made = Path(tempfile.mkdtemp(dir=self._directory, prefix=".new-"))
        try:
            async with asyncio.timeout(BUILD_LIMIT_S):
                state, whole = await self._make(digest, made, recipe, new_box, problem)
                await asyncio.to_thread(self._publish, made, digest, state, whole)
        except TimeoutError as error:
            raise SandboxError(f"the image was not built in {BUILD_LIMIT_S:.0f} s") from error
        except (OSError, RecursionError) as error:
            raise SandboxError(f"the image could not be kept: {error}") from error
        finally:
            await asyncio.to_thread(layers.remove, made)
        for away in self._shrink():
            await asyncio.to_thread(layers.remove, away)

    async def _make(
        self, digest: str, made: Path, recipe: Recipe, new_box: NewBox, problem: str | None
    ) -> tuple[ImageState, bool]:
        """Fill a directory; what the image says, and whether it is a whole file system."""
        assert recipe.file is not None and recipe.data is not None
        if problem is None:
            try:
                return await self._make_layers(made, recipe, new_box), False
            except OutOfMemory:
                if self._builder is None:  # which has all of the host's
                    raise
            except SandboxUnsupported as error:
                if self._builder is None:
                    raise SandboxUnsupported(f"{error}; {_ADVICE}") from None
        assert self._builder is not None
        context = recipe.context.root if recipe.buildable else None
        return await self._builder.build(recipe.data, context, made / "root", digest), True

    async def _make_layers(self, made: Path, recipe: Recipe, new_box: NewBox) -> ImageState:
        assert recipe.file is not None
        new = self._opener(new_box, "image")
        place = await new()
        try:
            state = await HostBuild(recipe.file, recipe.context, new).follow(place)
            root, usr = place.box.open_written()
        finally:
            await place.box.close()
        try:  # no process of the sandbox is left to change anything
            await asyncio.to_thread(layers.copy_layer, root, made / "root")
            await asyncio.to_thread(layers.copy_layer, usr, made / "usr")
        finally:
            os.close(root)
            os.close(usr)
        return state

    def _opener(self, new_box: NewBox, kind: str) -> Callable[[], Awaitable[Workplace]]:
        async def new() -> Workplace:
            names: list[str] = []

            def told(name: str, by_command: bool) -> None:
                if name not in names:
                    names.append(name)

            self._builds += 1
            box = await new_box(f"{kind}.{self._builds}", self.base, told)
            return Workplace(box, lambda: names)

        return new

    def _publish(self, made: Path, digest: str, state: ImageState, whole: bool) -> None:
        told = {"state": asdict(state), "whole": whole, "bytes": layers.size_of(made)}
        (made / "image.json").write_text(json.dumps(told))
        layers.flush(made)
        os.rename(made, self._directory / digest)
        layers.flush(self._directory)

    def _shrink(self) -> list[Path]:
        """Take away the images that were not used for the longest time, down to the limit.

        It runs between two steps of the trials, so that none can come to hold what it takes.
        """
        gone: list[Path] = []
        found = []
        for place in self._directory.iterdir():
            if not place.name.startswith("."):
                told = json.loads((place / "image.json").read_bytes())
                found.append((place.stat().st_mtime_ns, place, told["bytes"]))
        total = sum(size for _, _, size in found)
        for _, place, size in sorted(found, key=lambda one: one[0]):
            if total <= self._limit:
                break
            if self._held[place.name] == 0:
                away = self._directory / f".old-{place.name}"
                os.rename(place, away)
                gone.append(away)
                total -= size
        return gone


def open_images(trials_dir: Path, program: str, limit_bytes: int) -> Images:
    """The images of a server; `program` is a builder or "host". Raises UserError."""
    if program != "host" and missing(program):
        raise UserError(
            f"--images {program}: there is no such program; install it "
            f"(Debian: apt-get install {program}), or leave --images away"
        )
    builder = None if program == "host" else Builder(program)
    return Images(trials_dir / ".images", make_base(trials_dir / ".base"), builder, limit_bytes)


_ADVICE = (
    "start the agent server with --images buildah (Debian: apt-get install buildah) "
    "or with --sandbox docker"
)


def _host_identity(base: Path) -> str:
    """A digest of the base directory and of which programs this host has."""
    total = hashlib.sha256(Context(base).digest().encode())
    for name in _SYSTEM_FILES:
        if os.path.isfile(name):
            total.update(Path(name).read_bytes())
    for directory in _SYSTEM_DIRECTORIES:
        place = os.path.join("/usr", directory)
        if os.path.isdir(place):
            total.update(f"{place} {os.stat(place).st_mtime_ns}".encode())
    return total.hexdigest()
