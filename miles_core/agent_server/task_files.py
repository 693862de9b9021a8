"""Whether the files of a task can be read at all, before anything reads them.

A pipe would block its reader for ever, a device has no end, and a link to a folder of the host
would have Harbor read all that is there when it digests a task.
"""

from __future__ import annotations

import os
from pathlib import Path

from miles_core.regular_files import of_kernel, why_unreadable

READ_LIMIT = 16 << 20
"""Bytes of a file that is read into memory."""
MOST_ENTRIES = 1_000_000
"""Files and folders of a task, where what links lead to counts each time."""

_READ: tuple[str, ...] = (
    *("instruction.md", "trajectory.json", "workdir/setup.sh"),
    *("tests/test.sh", "tests/test.bat", "tests/Dockerfile", "tests/docker-compose.yaml"),
    *("solution/solve.sh", "solution/solve.bat"),
)
"""Read of a task, or of each of its steps."""
_READ_ONCE: tuple[str, ...] = (
    *("task.toml", "environment/Dockerfile", "environment/docker-compose.yaml"),
    *("environment/.dockerignore", "environment/Dockerfile.dockerignore"),
)
_RULES = ".harborignore"


class BadFiles(ValueError):
    """A task has a file or a link with which it cannot be read; the message names it."""


def check_files(task_dir: Path) -> None:
    """Raise BadFiles for a task whose files cannot be read to their end."""
    names = [*_READ_ONCE, *_READ]
    names += [f"{step}/{name}" for step in _steps(task_dir) for name in _READ]
    for name in names:
        _check(task_dir, name)
    _Walk(task_dir).visit(task_dir, "")


def _steps(task_dir: Path) -> list[str]:
    return [f"steps/{path.name}" for path in sorted(task_dir.glob("steps/*"))]


def _check(task_dir: Path, name: str) -> None:
    """Raise BadFiles for a file that is there and cannot be read."""
    path = task_dir / name
    if os.path.exists(path):
        problem = why_unreadable(path, READ_LIMIT)
        if problem:
            raise BadFiles(f"{name} {problem}")


class _Walk:
    """Follows the folders of a task and its links to folders, each of them once."""

    def __init__(self, task_dir: Path) -> None:
        self._task_dir = task_dir
        self._root = os.path.realpath(task_dir)
        self._above: set[str] = set()
        self._sizes: dict[str, int] = {}

    def visit(self, directory: str | Path, name: str) -> int:
        """How many files and folders are below a directory, `name` in the task; raises BadFiles."""
        real = os.path.realpath(directory)
        if real in self._above:
            raise BadFiles(f"{name} is a link to a folder that it is in")
        if real in self._sizes:
            return self._sizes[real]
        self._above.add(real)
        size = 0
        with os.scandir(directory) as listed:
            for entry in listed:
                size += 1 + self._below(entry, f"{name}/{entry.name}" if name else entry.name)
                if size > MOST_ENTRIES:
                    raise BadFiles(f"{name or 'the task'} has more than {MOST_ENTRIES} files")
        self._above.discard(real)
        self._sizes[real] = size
        return size

    def _below(self, entry: os.DirEntry[str], name: str) -> int:
        """How many files and folders are below an entry of a directory."""
        if entry.is_symlink():
            if of_kernel(entry.path) and os.path.exists(entry.path):
                raise BadFiles(f"{name} leads to {os.path.realpath(entry.path)}")
            if entry.is_dir() and not self._inside(entry.path):
                real = os.path.realpath(entry.path)
                raise BadFiles(f"{name} is a link to the folder {real}, outside of the task")
        if entry.name == _RULES:
            _check(self._task_dir, name)
        return self.visit(entry.path, name) if entry.is_dir() else 0

    def _inside(self, path: str) -> bool:
        real = os.path.realpath(path)
        return real == self._root or real.startswith(f"{self._root}/")
