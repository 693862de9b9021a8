"""Following a task's Dockerfile inside a sandbox that has started."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from miles_core.agent_server.sandbox import dockerfile
from miles_core.agent_server.sandbox.box import PATH
from miles_core.agent_server.sandbox.dockerfile import Instruction
from miles_core.agent_server.sandbox.errors import SandboxUnsupported

if TYPE_CHECKING:
    from miles_core.agent_server.sandbox.environment import BubblewrapEnvironment


@dataclass
class ImageState:
    """What the instructions so far have set."""

    workdir: str = "/"
    user: str | None = None
    env: dict[str, str] = field(default_factory=lambda: {"PATH": PATH})
    arguments: dict[str, str] = field(default_factory=dict)
    shell: list[str] = field(default_factory=lambda: ["/bin/sh", "-c"])

    def variables(self) -> dict[str, str]:
        return {**self.arguments, **self.env}


async def build(environment: BubblewrapEnvironment, context: Path) -> None:
    """Apply the Dockerfile of `context` (the task's environment directory), if there is one.

    Raises SandboxUnsupported, naming the line, for an instruction that this sandbox cannot follow
    and for a RUN that fails: there is no network, and no image beside the host's own system.
    """
    path = context / "Dockerfile"
    image = environment.task_env_config.docker_image
    if not path.is_file():
        if image:
            dockerfile.check_image(image, "task.toml: docker_image")
        return
    instructions = dockerfile.parse(path.read_text(errors="replace"))
    stages = [made for made in instructions if made.name == "FROM"]
    if not stages:
        raise SandboxUnsupported("Dockerfile: there is no FROM, so no image can be built from it")
    if len(stages) > 1:
        raise SandboxUnsupported(f"{stages[1].where()}: only one stage is supported")
    for instruction in instructions:
        await _apply(environment, context, instruction)


async def _apply(
    environment: BubblewrapEnvironment, context: Path, instruction: Instruction
) -> None:
    state = environment.image
    text = dockerfile.expand(instruction.text, state.variables())
    if instruction.name == "FROM":
        image = dockerfile.image_of(instruction)
        dockerfile.check_image(dockerfile.expand(image, state.variables()), instruction.where())
    elif instruction.name == "ARG":
        key, _, value = text.partition("=")
        state.arguments.setdefault(key.strip(), value.strip("\"'"))
    elif instruction.name == "ENV":
        state.env.update(dockerfile.key_values(instruction, state.variables()))
    elif instruction.name == "USER":
        state.user = text
        if environment.default_user is None:
            environment.default_user = text
    elif instruction.name == "SHELL":
        state.shell = instruction.json_form() or state.shell
    elif instruction.name == "WORKDIR":
        state.workdir = environment.inside(text.strip("\"'"))
        await environment.checked(["mkdir", "-p", state.workdir])
    elif instruction.name == "RUN":
        await _run(environment, instruction)
    elif instruction.name in ("COPY", "ADD"):
        await _copy(environment, context, instruction)


async def _run(environment: BubblewrapEnvironment, instruction: Instruction) -> None:
    state = environment.image
    text = instruction.text
    while text.startswith("--"):
        text = text.partition(" ")[2].strip()
    argv = instruction.json_form() or [*state.shell, text]
    before = len(environment.lookups)
    done = await environment.run(argv, env=state.arguments, user=state.user or "root")
    names = environment.lookups[before:]
    if done.code == 0 and names:
        raise SandboxUnsupported(
            f"{instruction.where()}: looks for {', '.join(names)} in a sandbox without a network; "
            "use --sandbox docker for this task"
        )
    if done.code != 0:
        output = (done.err or done.out).decode(errors="replace").strip()[-300:]
        raise SandboxUnsupported(
            f"{instruction.where()}: failed with {done.code} in a sandbox without a network "
            f"({output}); use --sandbox docker for this task"
        )


async def _copy(
    environment: BubblewrapEnvironment, context: Path, instruction: Instruction
) -> None:
    state = environment.image
    flags, patterns, target = dockerfile.copy_arguments(instruction, state.variables())
    place = environment.inside(target)
    sources = [
        source
        for pattern in patterns
        for source in dockerfile.sources_in(context, pattern, instruction)
    ]
    if len(sources) > 1 and not place.endswith("/"):
        raise SandboxUnsupported(f"{instruction.where()}: several sources need a target with /")
    for source in sources:
        if source.is_dir():
            await environment.upload_dir(source, place)
            continue
        name = place + source.name if place.endswith("/") else place
        if not place.endswith("/") and await environment.is_dir(place, user="root"):
            name = f"{place}/{source.name}"
        await environment.upload_file(source, name)
        if instruction.name == "ADD" and is_archive(source.name):
            script = 'tar xf "$1" -C "$(dirname "$1")" && rm -- "$1"'
            await environment.checked(["sh", "-c", script, "add", name])
    if "chown" in flags:
        await environment.checked(["chown", "-R", flags["chown"], place.rstrip("/") or "/"])
    if "chmod" in flags:
        await environment.checked(["chmod", "-R", flags["chmod"], place.rstrip("/") or "/"])


def is_archive(name: str) -> bool:
    """Whether ADD unpacks a file of this name."""
    return name.endswith((".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz"))
