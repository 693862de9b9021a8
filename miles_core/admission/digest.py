"""Task directories: which there are, and what one of them holds."""

from __future__ import annotations

import hashlib
import os
import stat
import tomllib
from pathlib import Path

from miles_core.regular_files import why_unreadable

_PARTS = ("task.toml", "instruction.md", "tests", "environment", "solution")
_CHUNK = 1 << 20
_TOML_LIMIT = 16 << 20


def is_task(directory: Path) -> bool:
    """Whether a directory is a task, or was meant to be one."""
    if (directory / "task.toml").exists():
        return True
    return sum((directory / name).exists() for name in _PARTS) > 1


def task_names(tasks_dir: Path) -> list[str]:
    """The names of the task directories of a folder."""
    return sorted(entry.name for entry in tasks_dir.iterdir() if _why_none(entry) is None)


def no_tasks(tasks_dir: Path) -> dict[str, list[str]]:
    """The names of what else is in a folder, sorted, by why they are no tasks."""
    found: dict[str, list[str]] = {}
    for entry in sorted(tasks_dir.iterdir()):
        why = _why_none(entry)
        if why is not None:
            found.setdefault(why, []).append(entry.name)
    return found


def _why_none(entry: Path) -> str | None:
    """Why an entry of a folder is no task, or None for one."""
    if entry.name.startswith("."):
        return "hidden"
    if entry.is_symlink() and not entry.exists():
        return "a link that leads nowhere"
    if not entry.is_dir():
        return "a file"
    if is_task(entry):
        return None
    return "an empty folder" if not any(entry.iterdir()) else "a folder without task.toml"


def has_solution(task_dir: Path) -> bool:
    """Whether a task brings a solution, its own or for one of its steps."""
    roots = [task_dir, *task_dir.glob("steps/*")]
    return any(path.is_file() for root in roots for path in root.glob("solution/solve*"))


def needs_no_network(task_dir: Path) -> bool:
    """Whether a task declares that it needs no network; false when it cannot be read."""
    if why_unreadable(task_dir / "task.toml", _TOML_LIMIT):
        return False
    try:
        config = tomllib.loads((task_dir / "task.toml").read_text())
        return bool(config["environment"]["network_mode"] == "no-network")
    except (OSError, ValueError, KeyError, TypeError):
        return False


def task_digest(task_dir: Path) -> str:
    """SHA-256 (hex) of a task directory: names, kinds, permission bits, bytes and link targets.

    A link counts by its text and, when it leads to a file, by that file's bytes too. What has no
    bytes of its own, such as a pipe or a file of the kernel's, is not read.
    """
    digest = hashlib.sha256(b"task\0")
    for root, folders, files in os.walk(task_dir):
        folders.sort()
        for name in sorted([*files, *folders]):
            path = Path(root) / name
            _add(digest, path, path.relative_to(task_dir).as_posix())
    return digest.hexdigest()


def _add(digest: hashlib._Hash, path: Path, name: str) -> None:
    info = path.lstat()
    kind, mode = stat.S_IFMT(info.st_mode), stat.S_IMODE(info.st_mode)
    digest.update(os.fsencode(name) + f"\0{kind:o} {mode:o}\0".encode())
    if stat.S_ISLNK(info.st_mode):
        digest.update(os.fsencode(os.readlink(path)) + b"\0")
    if why_unreadable(path) is None:
        content = hashlib.sha256()
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                content.update(chunk)
        digest.update(content.digest())
