"""A folder of checkpoints of which the newest complete one can always be found.

`begin` gives a temporary directory, the trainer writes into it, `publish` seals and renames it. A
crash at any moment leaves the previous checkpoint as it was.
"""

from __future__ import annotations

import json
import re
import shutil
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miles_core.checkpoints import manifest
from miles_core.checkpoints.layout import STATE_FILE, TRACKER_FILE
from miles_core.errors import UserError

_NAME = re.compile(r"^iter_(\d{7,})$")
_LEFTOVER = (".tmp-iter_", ".old-iter_")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint. `passed_over` says which newer ones were not, and why."""

    path: Path
    iteration: int
    state: dict[str, Any]
    passed_over: list[str] = field(default_factory=list)


def _name(iteration: int) -> str:
    return f"iter_{iteration:07d}"


def _published(root: Path) -> list[tuple[int, Path]]:
    """(iteration, directory) of everything that carries a checkpoint's name, newest first."""
    if not root.is_dir():
        return []
    found = [(match, path) for path in root.iterdir() if (match := _NAME.match(path.name))]
    return sorted(((int(match[1]), path) for match, path in found), reverse=True)


def published(root: str | Path) -> list[Path]:
    """Everything below a folder that carries a checkpoint's name, newest first."""
    return [path for _, path in _published(Path(root))]


def begin(root: str | Path, iteration: int) -> Path:
    """An empty directory to write a checkpoint into; leftovers of crashes are removed.

    One process at a time may save under `root`.
    """
    root = Path(root)
    if not root.is_dir():
        root.mkdir(parents=True)
        manifest.sync(root.parent)
    for path in root.iterdir():
        if path.name.startswith(_LEFTOVER):
            shutil.rmtree(path)
    temporary = root / f".tmp-{_name(iteration)}-{uuid.uuid4().hex[:8]}"
    temporary.mkdir()
    return temporary


def publish(
    tmp: Path,
    root: str | Path,
    iteration: int,
    state: dict[str, Any],
    keep: int,
    known: manifest.Digests | None = None,
) -> Path:
    """Complete the checkpoint in `tmp` and make it the newest; all but `keep` are dropped.

    `state` goes into `miles_state.json` with the iteration. `known` has size and digest of files
    that were digested while they were written. Raises ValueError for `keep` below 1.
    """
    if keep < 1:
        raise ValueError("at least one checkpoint has to be kept")
    root = Path(root)
    content = {**state, "iteration": iteration}
    manifest.write_durably(tmp / STATE_FILE, json.dumps(content, indent=1))
    manifest.seal(tmp, known, iteration=iteration)
    target = root / _name(iteration)
    manifest.put_in_place(tmp, target)
    manifest.write_durably(root / TRACKER_FILE, f"{iteration}\n")
    others = [path for number, path in _published(root) if path != target]
    older = [path for path in others if path.name < target.name]
    for path in older[keep - 1 :]:
        _remove(path)
    return target


def _remove(path: Path) -> None:
    """Take its name away first: a crash leaves no checkpoint that is half there."""
    doomed = path.with_name(f".old-{path.name}-{uuid.uuid4().hex[:8]}")
    path.rename(doomed)
    shutil.rmtree(doomed)


def verify(directory: str | Path) -> str | None:
    """What is wrong with a checkpoint, or None when it is complete and unchanged."""
    directory = Path(directory)
    match = _NAME.match(directory.name)
    about = manifest.read(directory)
    if match and about is not None and about.get("iteration") != int(match[1]):
        return f"its manifest is of iteration {about.get('iteration')}"
    return manifest.verify(directory)


def latest(root: str | Path) -> Checkpoint | None:
    """The newest checkpoint whose manifest verifies, or None when nothing was ever saved.

    Newer ones that do not are named in `passed_over`. The directories decide, not the tracker: a
    crash may fall between the two. Raises UserError when there are checkpoints but none is whole:
    a run does not begin anew by itself.
    """
    passed_over: list[str] = []
    for iteration, path in _published(Path(root)):
        problem = verify(path)
        if problem is None:
            state = json.loads((path / STATE_FILE).read_text())
            return Checkpoint(path, iteration, state, passed_over)
        passed_over.append(f"{path.name}: {problem}")
    if passed_over:
        raise UserError(
            f"no checkpoint in {root} is whole: {'; '.join(passed_over)}",
            "Restore one of them from a copy, or begin another run.",
        )
    return None
