"""Bubblewrap sandboxes: the kernel ends them with their server, and their cgroups tell of others.

Found are the cgroups of servers that are gone, whichever trials directory they had, and of this
server those whose trial has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path

from miles_core.agent_server.environments import BUBBLEWRAP
from miles_core.agent_server.reaper.left import KindFailed, Left
from miles_core.agent_server.reaper.owner import tag
from miles_core.agent_server.sandbox import cgroups

BUILDS = "images."
"""How the names of boxes begin in which images are built: they belong to no trial."""


class Bubblewrap:
    """What is in cgroups of dead servers, and in `directories`, those of this server."""

    name = BUBBLEWRAP

    def __init__(self, directories: Iterable[Path] = (), root: Path = cgroups.ROOT) -> None:
        self._directories = list(directories)
        self._root = root

    async def find(self) -> list[Left]:
        """All that are there."""
        return await asyncio.to_thread(self._find)

    async def remove(self, left: Left) -> None:
        """End the processes in its cgroups and remove these; raises KindFailed."""
        for name in left.parts["cgroups"]:
            try:
                gone = await asyncio.to_thread(cgroups.end, Path(name))
            except FileNotFoundError:
                continue
            if not gone:
                raise KindFailed(f"{name} is still in use")

    def _find(self) -> list[Left]:
        found: dict[str, Left] = {}
        for directory in cgroups.abandoned(self._root):
            boxes = sorted(entry.name for entry in directory.iterdir() if entry.is_dir())
            trials = " ".join(box.rpartition("-")[0] or box for box in boxes)
            self._add(found, directory.name, trials, None, directory)
        for parent in self._directories:
            for directory in filter(Path.is_dir, parent.iterdir()):
                if not directory.name.startswith(BUILDS):
                    trial = directory.name.rpartition("-")[0]
                    self._add(found, directory.name, trial, tag(trial), directory)
        return list(found.values())

    def _add(
        self, found: dict[str, Left], name: str, trial: str, owner: str | None, directory: Path
    ) -> None:
        left = found.setdefault(name, Left(self.name, name, trial, owner, None))
        with contextlib.suppress(OSError):
            left.age_s = max(left.age_s or 0.0, time.time() - os.stat(directory).st_mtime)
        left.parts.setdefault("cgroups", []).append(str(directory))
        inside = [directory, *filter(Path.is_dir, directory.iterdir())]
        pids = {str(pid) for place in inside for pid in cgroups.members(place)}
        if pids:
            known = set(left.parts.get("processes", []))
            left.parts["processes"] = sorted(known | pids)
