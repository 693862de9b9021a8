"""What of a task an agent must not see, and which files its verifier reads."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FILES = 40
"""Secret files of one task that are looked for."""

FILE_BYTES = 256 << 10
LINE_LENGTH = 8
"""Shorter lines tell nothing."""

NEEDLE_LENGTH = 200
SOLUTION_LENGTH = 20
TESTS_LENGTH = 40
"""Characters in telling lines below which a file might be like many others."""

GIT_SHARE = 0.5
"""Share of the solution's lines in foreign commits that is the solution."""

TARGETS = 40

_SUFFIXES = "sh bash py js mjs ts rb pl go rs c cc cpp h java kt php lua r sql"
_CODE = frozenset(f".{name}" for name in _SUFFIXES.split())
_PATCHES = (".patch", ".diff")
_ABSOLUTE = re.compile(r"(?<![\w./$}])(/(?:[\w.+-]+/)*[\w+-][\w.+-]*)")
_RELATIVE = re.compile(r"(?<![\w/.-])([\w-]+\.(?:txt|json|log|out|csv|dat))\b")
_NOT_TARGETS = (
    "/tests",
    "/solution",
    "/logs/verifier",
    "/usr",
    "/bin",
    "/sbin",
    "/etc",
    "/proc",
    "/sys",
    "/dev",
    "/lib",
)


@dataclass(frozen=True)
class Secret:
    """A file of the task that an agent must not see.

    `path` is relative to the task, `lines` are its telling lines, `strict` says that a copy in
    the sandbox is a fault and not just worth a look.
    """

    path: str
    lines: tuple[str, ...]
    strict: bool

    @property
    def is_solution(self) -> bool:
        return "solution" in Path(self.path).parts

    @property
    def telling(self) -> str:
        """The line to search for."""
        return max(self.lines, key=len)[:NEEDLE_LENGTH]

    def is_in(self, text: str) -> bool:
        """Whether a text has every telling line."""
        return all(line in text for line in self.lines)


def secrets_of(task_dir: Path) -> list[Secret]:
    """The files of a task's `solution/` and `tests/`, of its steps too, that can be looked for.

    Strict are the solution's own script and patches, and the code of the tests. Other files of a
    solution may be an input of the task unchanged, and data of the tests often are.
    """
    found = []
    for path in _files(task_dir, "solution"):
        lines = _telling(path, SOLUTION_LENGTH)
        strict = path.stem == "solve" or path.suffix in _PATCHES
        found.append(Secret(str(path.relative_to(task_dir)), lines, strict))
    for path in _files(task_dir, "tests"):
        if path.suffix in _CODE:
            lines = _telling(path, TESTS_LENGTH)
            found.append(Secret(str(path.relative_to(task_dir)), lines, strict=True))
    return [secret for secret in found if secret.lines][:FILES]


def targets_of(task_dir: Path) -> list[str]:
    """The paths that the code of the tests names: a verifier might read a reward there."""
    found: dict[str, None] = {}
    for path in _files(task_dir, "tests"):
        if path.suffix not in _CODE:
            continue
        text = _read(path) or ""
        for name in [*_ABSOLUTE.findall(text), *_RELATIVE.findall(text)]:
            if not any(name == bad or name.startswith(f"{bad}/") for bad in _NOT_TARGETS):
                found[name.rstrip(".")] = None
    return list(found)[:TARGETS]


def in_patches(secret: Secret, history: str) -> bool:
    """Whether the added lines of `history` hold most of what a solution adds."""
    added = {line[1:].strip() for line in history.splitlines() if line.startswith("+")}
    own = [line.lstrip("+").strip() for line in secret.lines if line.startswith("+")]
    wanted = [line for line in own or secret.lines if len(line) >= LINE_LENGTH]
    return bool(wanted) and sum(line in added for line in wanted) >= GIT_SHARE * len(wanted)


def _files(task_dir: Path, name: str) -> Iterator[Path]:
    for root in [task_dir, *sorted(task_dir.glob("steps/*"))]:
        for path in sorted((root / name).rglob("*")):
            if path.is_file() and not path.is_symlink():
                yield path


def _read(path: Path) -> str | None:
    """The text of a small file; None for a large or binary one."""
    if path.stat().st_size > FILE_BYTES:
        return None
    data = path.read_bytes()
    return None if b"\0" in data else data.decode(errors="replace")


def _telling(path: Path, least: int) -> tuple[str, ...]:
    """The lines that tell a file from others: no comments, no short ones. Empty: none do."""
    stripped = [line.strip() for line in (_read(path) or "").splitlines()]
    lines = tuple(
        dict.fromkeys(
            line for line in stripped if len(line) >= LINE_LENGTH and not line.startswith("#")
        )
    )
    return lines if sum(map(len, lines)) >= least else ()
