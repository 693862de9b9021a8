"""Reading a Dockerfile: lines to instructions, instructions to stages.

Syntax after the Dockerfile reference: comments, parser directives, line continuation, JSON form,
heredocs, several stages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from miles_core.agent_server.sandbox import words
from miles_core.agent_server.sandbox.errors import DockerfileInvalid, SandboxUnsupported

IGNORED = frozenset(
    {"CMD", "EXPOSE", "LABEL", "MAINTAINER", "STOPSIGNAL", "HEALTHCHECK", "VOLUME", "ONBUILD"}
)
"""They change nothing in a sandbox whose commands are all started from outside."""

FOLLOWED = frozenset(
    {"FROM", "WORKDIR", "ENV", "RUN", "COPY", "ADD", "USER", "ARG", "SHELL", "ENTRYPOINT"}
)

WORKING = frozenset({"RUN", "COPY", "ADD"})
"""They make files; the others only say how commands are run."""

BASE_IMAGES = frozenset({"scratch", "debian", "ubuntu", "bash", "buildpack-deps", "python"})
"""Images that the host's own system stands in for."""

SHOWN = 80
"""Characters of an instruction that an error shows."""

_DIRECTIVE = re.compile(r"#\s*(\w+)\s*=\s*(\S+)\s*")
_HEREDOC = re.compile(r"\d*<<(-?)(['\"]?)([A-Za-z_][\w.-]*)\2")


@dataclass(frozen=True)
class Heredoc:
    """A text within a Dockerfile; `expanded` when variables in it are replaced."""

    name: str
    text: str
    expanded: bool


@dataclass(frozen=True)
class Instruction:
    """One instruction: its line, its name in capitals, the rest as one line, its heredocs."""

    line: int
    name: str
    text: str
    escape: str = "\\"
    heredocs: tuple[Heredoc, ...] = ()
    raw_heredocs: str = ""
    """The lines of the heredocs as they are written, with their ends."""

    def where(self) -> str:
        text = " ".join(self.text.split())
        shown = text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."
        return f"Dockerfile line {self.line}: {self.name} {shown}"

    def invalid(self, problem: object) -> DockerfileInvalid:
        return DockerfileInvalid(f"{self.where()}: {problem}")

    def unsupported(self, problem: object) -> SandboxUnsupported:
        return SandboxUnsupported(f"{self.where()}: {problem}")

    def flags(self) -> tuple[list[tuple[str, str]], str]:
        """The leading `--name=value` in their order, and the text after them."""
        found, text = [], self.text
        while text.startswith("--"):
            flag, text = (text.split(None, 1) + [""])[:2]
            name, _, value = flag[2:].partition("=")
            found.append((name, value))
        return found, text

    def json_form(self) -> list[str] | None:
        """The list of the JSON form, or None for the shell form."""
        _, text = self.flags()
        if not text.startswith("["):
            return None
        try:
            value = json.loads(text)
        except ValueError:
            return None
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return value
        return None

    def split(self, text: str, variables: Mapping[str, str]) -> list[str]:
        """The words of a part of this instruction; raises DockerfileInvalid."""
        try:
            return words.split(text, variables, self.escape)
        except words.WordError as error:
            raise self.invalid(error) from error

    def whole(self, variables: Mapping[str, str]) -> str:
        """The text as one word; raises DockerfileInvalid when it is empty."""
        try:
            value = words.whole(self.text, variables, self.escape)
        except words.WordError as error:
            raise self.invalid(error) from error
        if not value:
            raise self.invalid("needs a value")
        return value

    def expand(self, text: str, variables: Mapping[str, str]) -> str:
        """`text` with its variables replaced; raises DockerfileInvalid."""
        try:
            return words.expand(text, variables, self.escape)
        except words.WordError as error:
            raise self.invalid(error) from error


@dataclass
class Stage:
    """What follows one FROM. `image` is what it names, `platform` its flag, if any."""

    origin: Instruction
    image: str
    name: str | None
    instructions: list[Instruction] = field(default_factory=list)


@dataclass
class Dockerfile:
    """The stages of a Dockerfile, and the ARGs before the first."""

    stages: list[Stage]
    arguments: dict[str, str]

    def find(self, name: str, before: int) -> int | None:
        """The stage of this name or number among those before number `before`."""
        for number in range(before - 1, -1, -1):
            if (self.stages[number].name or "") == name.lower():
                return number
        return int(name) if name.isdigit() and int(name) < before else None

    def chain(self, number: int) -> list[int]:
        """The stages that stage `number` continues, the first one first, itself last."""
        parent = self.find(self.stages[number].image, number)
        return [*(self.chain(parent) if parent is not None else []), number]

    def root_image(self, number: int) -> tuple[str, Instruction]:
        """The image that a stage begins with in the end, and the FROM that says so."""
        first = self.stages[self.chain(number)[0]]
        return first.image, first.origin


def read(data: bytes, platform: Mapping[str, str]) -> Dockerfile:
    """The Dockerfile in `data`; `platform` has the values of TARGETARCH and the like.

    Raises DockerfileInvalid, with the line, for what no builder would take.
    """
    instructions = parse(data.decode("utf-8", "surrogateescape").removeprefix("\ufeff"))
    made = Dockerfile([], {})
    declared: dict[str, str] = dict(platform)
    for instruction in instructions:
        if instruction.name == "FROM":
            made.stages.append(_stage(instruction, declared))
        elif made.stages:
            made.stages[-1].instructions.append(instruction)
        elif instruction.name == "ARG":
            for key, value in arguments(instruction, declared):
                if value is not None:
                    declared[key] = value
        else:
            raise instruction.invalid("comes before the first FROM")
    if not made.stages:
        line = instructions[0].line if instructions else 1
        raise DockerfileInvalid(f"Dockerfile line {line}: there is no FROM, so it makes no image")
    made.arguments = declared
    return made


def _stage(instruction: Instruction, declared: Mapping[str, str]) -> Stage:
    _, text = instruction.flags()
    named = instruction.split(text, declared)
    if not named or not named[0]:
        raise instruction.invalid("names no image")
    if len(named) == 1:
        return Stage(instruction, named[0], None)
    if len(named) != 3 or named[1].lower() != "as":
        raise instruction.invalid("is not FROM image [AS name]")
    return Stage(instruction, named[0], named[2].lower())


def arguments(
    instruction: Instruction, variables: Mapping[str, str]
) -> list[tuple[str, str | None]]:
    """The names of an ARG, each with its default or None."""
    pairs = [word.partition("=") for word in instruction.split(instruction.text, variables)]
    if not pairs or not all(key for key, _, _ in pairs):
        raise instruction.invalid("needs a name")
    return [(key, value if equals else None) for key, equals, value in pairs]


def key_values(instruction: Instruction, variables: Mapping[str, str]) -> dict[str, str]:
    """The assignments of an ENV, in both of its forms."""
    first = words.raw_words(instruction.text, instruction.escape)[:1]
    if not first:
        raise instruction.invalid("needs a name and a value")
    if "=" not in first[0]:
        key, _, value = instruction.text.partition(" ")
        if not value.strip():
            raise instruction.invalid("needs a name and a value")
        try:
            return {key: words.whole(value.strip(), variables, instruction.escape)}
        except words.WordError as error:
            raise instruction.invalid(error) from error
    pairs = [word.partition("=") for word in instruction.split(instruction.text, variables)]
    for key, equals, _ in pairs:
        if not key or not equals:
            raise instruction.invalid(f"{key!r} is not NAME=VALUE")
    return {key: value for key, _, value in pairs}


def parse(text: str) -> list[Instruction]:
    """The instructions of a Dockerfile; raises DockerfileInvalid."""
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    escape = _escape(lines)
    ending = re.compile(re.escape(escape) + r"[ \t]*$")
    instructions: list[Instruction] = []
    pending: list[str] = []
    first = number = 0
    while number < len(lines):
        line = lines[number]
        number += 1
        if line.lstrip().startswith("#") or not line.strip():
            continue
        if not pending:
            first, line = number, line.lstrip()
        if ending.search(line):
            pending.append(ending.sub("", line))
            continue
        made, number = _instruction(first, "".join([*pending, line]), escape, lines, number)
        instructions.append(made)
        pending = []
    if "".join(pending).strip():
        instructions.append(_instruction(first, "".join(pending), escape, lines, number)[0])
    return instructions


def _escape(lines: list[str]) -> str:
    """The escape character that the parser directives at the top choose."""
    for line in lines:
        directive = _DIRECTIVE.fullmatch(line.strip())
        if directive is None:
            break
        if directive.group(1).lower() == "escape":
            if directive.group(2) not in ("\\", "`"):
                raise DockerfileInvalid(f"Dockerfile: {line.strip()}: escape is \\ or `")
            return directive.group(2)
    return "\\"


def _instruction(
    first: int, text: str, escape: str, lines: list[str], at: int
) -> tuple[Instruction, int]:
    """One instruction with the heredocs that follow it from line `at` on, and the next line."""
    name, rest = (text.split(None, 1) + [""])[:2]
    made = Instruction(first, name.upper(), rest.strip(), escape)
    if made.name not in FOLLOWED | IGNORED:
        raise made.invalid("there is no such instruction")
    if made.name not in WORKING:
        return made, at
    start, heredocs = at, []
    for word in words.raw_words(made.text, escape):
        opened = _HEREDOC.match(word)
        if opened is None:
            continue
        dash, quote, end = opened.groups()
        body: list[str] = []
        while True:
            if at >= len(lines):
                raise made.invalid(f"the text up to {end} has no end")
            line = lines[at].lstrip("\t") if dash else lines[at]
            at += 1
            if line == end:
                break
            body.append(line + "\n")
        heredocs.append(Heredoc(end, "".join(body), not quote))
    raw = "".join(line + "\n" for line in lines[start:at])
    return Instruction(first, made.name, made.text, escape, tuple(heredocs), raw), at


def is_heredoc(word: str) -> bool:
    """Whether a word of a RUN, COPY or ADD opens a heredoc."""
    return _HEREDOC.match(word) is not None


def stands_in(image: str, builder: bool) -> bool:
    """Whether the host's own system stands in for an image.

    Where there is a builder it makes the images that need no download as they are.
    """
    name = image.split("@")[0]
    last = name.rsplit("/", 1)[-1].split(":")[0]
    local = name.startswith("localhost/")
    if builder and (local or name == "scratch"):
        return False
    official = "/" not in name or name.startswith(("library/", "docker.io/library/"))
    return local or (official and last in BASE_IMAGES)
