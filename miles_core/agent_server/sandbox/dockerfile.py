"""The subset of Dockerfile that a sandbox without images can follow.

Syntax after the Dockerfile reference: comments, parser directives, line continuation, JSON form,
heredocs are refused. `FROM` is checked, not fetched: every task gets the host's own system.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from miles_core.agent_server.sandbox.errors import SandboxUnsupported

IGNORED = frozenset(
    {"CMD", "ENTRYPOINT", "EXPOSE", "LABEL", "MAINTAINER", "STOPSIGNAL", "HEALTHCHECK", "VOLUME"}
    | {"ONBUILD"}
)
"""They change nothing in a sandbox whose commands are all started from outside."""

FOLLOWED = frozenset({"FROM", "WORKDIR", "ENV", "RUN", "COPY", "ADD", "USER", "ARG", "SHELL"})

BASE_IMAGES = frozenset({"scratch", "debian", "ubuntu", "bash", "buildpack-deps", "python"})
"""Images that the host's own system stands in for."""

_VARIABLE = re.compile(r"\$(?:\{(\w+)(?:(:[-+])([^}]*))?\}|(\w+))")


@dataclass(frozen=True)
class Instruction:
    """One instruction: its line, its name in capitals, and the rest as one line of text."""

    line: int
    name: str
    text: str

    def where(self) -> str:
        return f"Dockerfile line {self.line}: {self.name} {self.text}"[:300]

    def json_form(self) -> list[str] | None:
        """The list of the JSON form, or None for the shell form."""
        if not self.text.startswith("["):
            return None
        try:
            value = json.loads(self.text)
        except ValueError:
            return None
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return value
        return None


def parse(text: str) -> list[Instruction]:
    """The instructions of a Dockerfile; raises SandboxUnsupported for what is not followed."""
    instructions: list[Instruction] = []
    escape = "\\"
    pending: list[str] = []
    first_line = 0
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        directive = re.fullmatch(r"#\s*escape\s*=\s*(\S)", stripped, re.IGNORECASE)
        if directive and not instructions and not pending:
            escape = directive.group(1)
        if stripped.startswith("#") or (not stripped and pending):
            continue
        if not stripped:
            continue
        if not pending:
            first_line = number
        if stripped.endswith(escape):
            pending.append(stripped[:-1])
            continue
        pending.append(stripped)
        instructions.append(_instruction(first_line, " ".join(pending).strip()))
        pending = []
    if pending:
        instructions.append(_instruction(first_line, " ".join(pending).strip()))
    return instructions


def _instruction(line: int, text: str) -> Instruction:
    name, _, rest = text.partition(" ")
    made = Instruction(line, name.upper(), rest.strip())
    if made.name not in FOLLOWED | IGNORED:
        raise SandboxUnsupported(f"{made.where()}: this instruction is not supported")
    if made.name in {"RUN", "COPY", "ADD"} and re.search(r"(?:^|\s)<<-?['\"]?\w", made.text):
        raise SandboxUnsupported(f"{made.where()}: heredocs are not supported")
    return made


def check_image(image: str, where: str) -> None:
    """Raise SandboxUnsupported for an image that the host's system cannot stand in for."""
    name = image.split("@")[0]
    last = name.rsplit("/", 1)[-1].split(":")[0]
    official = "/" not in name or name.startswith(("library/", "docker.io/library/"))
    if name.startswith("localhost/") or (official and last in BASE_IMAGES):
        return
    raise SandboxUnsupported(
        f"{where}: the bubblewrap sandbox has the host's own system and no images; "
        f"use --sandbox docker for image {image!r}"
    )


def image_of(instruction: Instruction) -> str:
    """The image that a FROM names."""
    words = [word for word in instruction.text.split() if not word.startswith("--")]
    if not words:
        raise SandboxUnsupported(f"{instruction.where()}: FROM names no image")
    return words[0]


def expand(text: str, variables: dict[str, str]) -> str:
    """Replace `$name`, `${name}`, `${name:-word}` and `${name:+word}` as a Dockerfile does."""

    def value(match: re.Match[str]) -> str:
        name = match.group(1) or match.group(4)
        operator, word = match.group(2), match.group(3)
        found = variables.get(name, "")
        if operator == ":-":
            return found or word
        if operator == ":+":
            return word if found else ""
        return found

    return _VARIABLE.sub(value, text)


def split(instruction: Instruction) -> list[str]:
    """The words of an instruction, without their quotes."""
    try:
        return shlex.split(instruction.text)
    except ValueError as error:
        raise SandboxUnsupported(f"{instruction.where()}: {error}") from error


def key_values(instruction: Instruction, variables: dict[str, str]) -> dict[str, str]:
    """The assignments of an ENV, in both of its forms."""
    words = split(instruction)
    if words and "=" not in words[0]:
        key, _, value = instruction.text.partition(" ")
        return {key: expand(value.strip(), variables)}
    pairs = [word.partition("=") for word in words]
    return {key: expand(value, variables) for key, _, value in pairs}


def copy_arguments(
    instruction: Instruction, variables: dict[str, str]
) -> tuple[dict[str, str], list[str], str]:
    """Flags, sources and target of a COPY or ADD."""
    words = instruction.json_form()
    flags: dict[str, str] = {}
    if words is None:
        words = split(instruction)
    while words and words[0].startswith("--"):
        key, _, value = words.pop(0)[2:].partition("=")
        flags[key] = expand(value, variables)
    words = [expand(word, variables) for word in words]
    if len(words) < 2:
        raise SandboxUnsupported(f"{instruction.where()}: needs a source and a target")
    if "from" in flags:
        raise SandboxUnsupported(f"{instruction.where()}: --from needs images")
    return flags, words[:-1], words[-1]


def sources_in(context: Path, pattern: str, instruction: Instruction) -> list[Path]:
    """The files of the build context that a source names; never outside of it."""
    if "://" in pattern or pattern.startswith("git@"):
        raise SandboxUnsupported(f"{instruction.where()}: ADD from a URL needs the network")
    root = context.resolve()
    relative = pattern.lstrip("/") or "."
    if any(mark in relative for mark in "*?["):
        found = sorted(root.glob(relative))
    else:
        found = [root / relative]
    for path in found:
        if not path.resolve().is_relative_to(root):
            raise SandboxUnsupported(f"{instruction.where()}: source leaves the build context")
    if not found or not all(path.exists() for path in found):
        raise SandboxUnsupported(f"{instruction.where()}: source does not exist")
    return found
