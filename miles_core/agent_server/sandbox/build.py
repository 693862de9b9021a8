"""Following a task's Dockerfile in sandboxes of the host's own system."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from miles_core.agent_server.evidence import NO_NETWORK
from miles_core.agent_server.sandbox import accounts, copying, dockerfile, packages
from miles_core.agent_server.sandbox.box import Box
from miles_core.agent_server.sandbox.channel import KILLED
from miles_core.agent_server.sandbox.context import Context
from miles_core.agent_server.sandbox.copying import Given
from miles_core.agent_server.sandbox.dockerfile import Dockerfile, Heredoc, Instruction
from miles_core.agent_server.sandbox.errors import OutOfMemory, SandboxError
from miles_core.agent_server.sandbox.privileges import PATH

COPY_FLAGS = ("from", "chown", "chmod", "link")
RUN_LIMIT_S = 1800.0
"""The most seconds of one RUN; the whole build of an image has a limit of its own."""

_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
_END_PROCESSES = ["sh", "-c", "kill -9 -1"]


def platform() -> dict[str, str]:
    """The ARGs that a builder sets by itself."""
    machine = os.uname().machine
    kind = _MACHINES.get(machine, machine)
    given = {"PLATFORM": f"linux/{kind}", "OS": "linux", "ARCH": kind, "VARIANT": ""}
    return {f"{side}{key}": value for side in ("TARGET", "BUILD") for key, value in given.items()}


@dataclass
class ImageState:
    """What an image says about the commands that are run in it; `user` None is root."""

    workdir: str = "/"
    user: str | None = None
    env: dict[str, str] = field(default_factory=lambda: {"PATH": PATH})
    shell: list[str] = field(default_factory=lambda: ["/bin/sh", "-c"])
    entrypoint: list[str] = field(default_factory=list)


@dataclass
class Workplace:
    """A started sandbox; `names` gives the public names that were looked up in it so far."""

    box: Box
    names: Callable[[], list[str]]


class HostBuild:
    """One Dockerfile that is followed; `new` starts the sandbox of a further stage.

    `follow` raises DockerfileInvalid for what no builder would take, SandboxUnsupported for what a
    sandbox without a network and without images cannot do, and OutOfMemory. All name the line.
    """

    def __init__(
        self, file: Dockerfile, context: Context, new: Callable[[], Awaitable[Workplace]]
    ) -> None:
        self._file = file
        self._context = context
        self._new = new
        self._stages: dict[int, Box] = {}

    async def follow(self, place: Workplace) -> ImageState:
        """Make the last stage in a sandbox; what its image says."""
        try:
            return await self._stage(len(self._file.stages) - 1, place)
        finally:
            for box in self._stages.values():
                await box.close()

    async def _stage(self, number: int, place: Workplace) -> ImageState:
        state, arguments = ImageState(), dict[str, str]()
        for one in self._file.chain(number):
            following = _Following(self, one, place, state, arguments)
            for instruction in self._file.stages[one].instructions:
                await following.apply(instruction)
        return state

    async def source(self, name: str, number: int, instruction: Instruction) -> Box:
        """The sandbox in which an earlier stage was made."""
        stage = self._file.find(name, number)
        if stage is None:
            raise instruction.unsupported(f"--from={name} is no earlier stage but an image")
        if stage not in self._stages:
            place = await self._new()
            self._stages[stage] = place.box
            await self._stage(stage, place)
        return self._stages[stage]

    @property
    def context(self) -> Context:
        return self._context

    @property
    def declared(self) -> dict[str, str]:
        return self._file.arguments


class _Following:
    """The instructions of one stage in one sandbox."""

    def __init__(
        self,
        build: HostBuild,
        number: int,
        place: Workplace,
        state: ImageState,
        arguments: dict[str, str],
    ) -> None:
        self._build = build
        self._number = number
        self._box, self._names = place.box, place.names
        self.state = state
        self.arguments = arguments

    def _variables(self) -> dict[str, str]:
        return {**self.arguments, **self.state.env}

    async def apply(self, instruction: Instruction) -> None:
        state, name = self.state, instruction.name
        if name == "ARG":
            for key, default in dockerfile.arguments(instruction, self._variables()):
                value = default if default is not None else self._build.declared.get(key)
                if value is not None:
                    self.arguments[key] = value
        elif name == "ENV":
            state.env.update(dockerfile.key_values(instruction, self._variables()))
        elif name == "USER":
            state.user = instruction.whole(self._variables())
        elif name == "SHELL":
            shell = instruction.json_form()
            if not shell:
                raise instruction.invalid("needs the JSON form")
            state.shell = shell
        elif name == "ENTRYPOINT":
            words = instruction.json_form()
            if words is None:
                words = [*state.shell, instruction.text] if instruction.text else []
            state.entrypoint = words
        elif name == "WORKDIR":
            state.workdir = self._inside(instruction.whole(self._variables())).rstrip("/") or "/"
            await copying.make_directory(self._box, state.workdir)
        elif name == "RUN":
            await self._run(instruction)
        elif name in ("COPY", "ADD"):
            await self._copy(instruction)

    def _inside(self, path: str) -> str:
        """An absolute path, with a last / where `path` has one."""
        joined = os.path.normpath(os.path.join("/", self.state.workdir, path))
        joined = "/" + joined.lstrip("/")
        return joined + "/" if path.endswith(("/", "/.")) and joined != "/" else joined

    async def _run(self, instruction: Instruction) -> None:
        await self._mounts(instruction)
        _, text = instruction.flags()
        argv, stdin = instruction.json_form(), None
        if argv is None and instruction.heredocs and dockerfile.is_heredoc(text):
            argv, stdin = self._script(instruction.heredocs[0], text)
        if argv is None:
            text = f"{text}\n{instruction.raw_heredocs}" if instruction.raw_heredocs else text
            argv = [*self.state.shell, text]
        account = await self._account(instruction, self.state.user)
        before, killed = len(self._names()), self._box.memory_kills()
        done = await self._box.run(
            argv,
            env={
                "HOME": account.home,
                **self._apt(instruction, argv[-1]),
                **self.arguments,
                **self.state.env,
            },
            cwd=self.state.workdir,
            user=account,
            stdin=stdin,
            timeout_s=RUN_LIMIT_S,
        )
        await self._box.run(_END_PROCESSES, timeout_s=30)
        names = self._names()[before:]
        if done.code == 0 and not names:
            return
        output = (done.err or done.out).decode(errors="replace").strip()[-300:]
        what = f"failed with {done.code}" + (f" ({output})" if output else "")
        if done.code == KILLED or (done.code != 0 and self._box.memory_kills() > killed):
            has = f"a RUN has {self._box.settings.limits.memory_mb} MB of memory"
            raise OutOfMemory(f"{instruction.where()}: {what}: it was killed; {has}")
        if names:
            what = f"looks for {', '.join(names)}"
        elif not any(
            NO_NETWORK.search(text.decode(errors="replace")) for text in (done.out, done.err)
        ):
            raise instruction.unsupported(what)
        raise instruction.unsupported(f"{what} in a sandbox without a network")

    def _apt(self, instruction: Instruction, script: str) -> dict[str, str]:
        """Variables under which apt finds that nothing is left to fetch, where that is so."""
        wanted = packages.asked(script)
        if wanted is None:
            return {}
        lacking = packages.missing(wanted)
        if lacking:
            raise instruction.unsupported(
                f"this host lacks the packages {' '.join(lacking)}, and a sandbox has no network: "
                "install them here"
            )
        return {"APT_CONFIG": packages.OFFLINE_CONFIG}

    def _script(self, given: Heredoc, text: str) -> tuple[list[str] | None, bytes | None]:
        """What runs a RUN that is nothing but a heredoc: the shell, or what its #! says."""
        if len(text.split()) > 1:
            return None, None
        if not given.text.startswith("#!"):
            return [*self.state.shell, given.text], None
        script = (
            'made=$(mktemp) && cat > "$made" && chmod 700 "$made" || exit 1\n'
            '"$made"; code=$?; rm -f -- "$made"; exit $code'
        )
        return ["sh", "-c", script], given.text.encode("utf-8", "surrogateescape")

    async def _mounts(self, instruction: Instruction) -> None:
        """Directories for the caches of a RUN; other mounts have contents, which is refused."""
        for name, value in instruction.flags()[0]:
            if name != "mount":
                continue
            options = dict(pair.partition("=")[::2] for pair in value.split(","))
            target = options.get("target") or options.get("dst") or options.get("destination")
            if options.get("type") not in ("cache", "tmpfs") or not target:
                raise instruction.unsupported("only mounts of type cache and tmpfs are followed")
            await copying.make_directory(self._box, self._inside(target))

    async def _copy(self, instruction: Instruction) -> None:
        flags, sources, target = self._copied(instruction)
        owner, mode = await self._ownership(instruction, flags)
        place = self._inside(target)
        try:
            given = await self._given(instruction, flags.get("from"), sources)
            if len(given) > 1 and not place.endswith("/") and place != "/":
                raise instruction.invalid("several sources need a target that ends with /")
            if instruction.name == "ADD":
                archives = [one for one in given if one.is_archive()]
                await self._extract(instruction, archives, place, flags)
                given = [one for one in given if not one.is_archive()]
            for one in given:
                directory, name = await self._target(one, place)
                await copying.make_directory(self._box, directory, owner or (0, 0))
                await copying.unpack(self._box, one.members(name), directory, owner, mode)
        except ValueError as error:
            raise instruction.invalid(error) from error
        except SandboxError as error:
            raise SandboxError(f"{instruction.where()}: {error}") from error

    def _copied(self, instruction: Instruction) -> tuple[dict[str, str], list[str], str]:
        """Flags, sources and target of a COPY or ADD, variables replaced."""
        given, text = instruction.flags()
        variables = self._variables()
        flags = {name: instruction.expand(value, variables) for name, value in given}
        unknown = [name for name in flags if name not in COPY_FLAGS]
        if unknown:
            raise instruction.unsupported(f"--{unknown[0]} is not followed")
        listed = instruction.json_form()
        if listed is not None:
            found = [instruction.expand(item, variables) for item in listed]
        else:
            found = instruction.split(text, variables)
        if len(found) < 2:
            raise instruction.invalid("needs a source and a target")
        return flags, found[:-1], found[-1]

    async def _given(
        self, instruction: Instruction, stage: str | None, sources: list[str]
    ) -> list[Given]:
        given: list[Given] = []
        texts = list(instruction.heredocs)
        for source in sources:
            if texts and dockerfile.is_heredoc(source):
                heredoc = texts.pop(0)
                text = heredoc.text
                if heredoc.expanded:
                    text = instruction.expand(text, self._variables())
                given.append(copying.of_text(heredoc.name, text))
            elif "://" in source or source.startswith("git@"):
                raise instruction.unsupported(f"{source} needs the network")
            elif stage is not None:
                box = await self._build.source(stage, self._number, instruction)
                given += await copying.of_stage(box, source)
            else:
                given += copying.of_context(self._build.context, source)
        return given

    async def _target(self, given: Given, place: str) -> tuple[str, str]:
        """The directory that a source is written into, and its name there, "" for itself."""
        directory = place.rstrip("/") or "/"
        if given.is_directory:
            return directory, ""
        if place.endswith("/") or await copying.is_directory(self._box, directory):
            return directory, given.name
        return os.path.dirname(directory), os.path.basename(directory)

    async def _extract(
        self, instruction: Instruction, archives: list[Given], place: str, flags: dict[str, str]
    ) -> None:
        if archives and ("chown" in flags or "chmod" in flags):
            raise instruction.unsupported("--chown and --chmod of an archive are not followed")
        directory = place.rstrip("/") or "/"
        for one in archives:
            assert one.file is not None
            await copying.make_directory(self._box, directory)
            await copying.extract(self._box, one.file, directory)

    async def _ownership(
        self, instruction: Instruction, flags: dict[str, str]
    ) -> tuple[tuple[int, int] | None, int | None]:
        """Owner and mode that the flags ask for; files of the context are root's without them."""
        owner: tuple[int, int] | None = None if "from" in flags else (0, 0)
        if "chown" in flags:
            account = await self._account(instruction, flags["chown"])
            owner = (account.uid, account.gid if ":" in flags["chown"] else account.uid)
        if "chmod" not in flags:
            return owner, None
        try:
            return owner, int(flags["chmod"], 8)
        except ValueError:
            raise instruction.unsupported("--chmod is followed as an octal number only") from None

    async def _account(self, instruction: Instruction, user: str | None) -> accounts.Account:
        if user is None or user in ("root", "0", "root:root", "0:0"):
            return accounts.ROOT
        listed = await self._box.run(accounts.READ, timeout_s=30)
        try:
            return accounts.find(user, listed.out.decode(errors="replace"))
        except SandboxError as error:
            raise instruction.invalid(error) from error


def state_of(config: dict[str, Any]) -> ImageState:
    """What the configuration of an OCI image says (`Env`, `WorkingDir`, `User`, `Entrypoint`)."""
    env = dict(pair.partition("=")[::2] for pair in config.get("Env") or [])
    return ImageState(
        workdir=config.get("WorkingDir") or "/",
        user=config.get("User") or None,
        env={"PATH": PATH, **env},
        entrypoint=list(config.get("Entrypoint") or []),
    )
