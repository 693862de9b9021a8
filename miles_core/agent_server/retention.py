"""How much of the past a server keeps: the newest ended trials, with all that they left.

A result is asked for soon after its trial has ended, so a removed trial is an old one; asked for
again, it is unknown. A directory that is being removed has a hidden name, and what a server that
was killed had begun to remove is removed at the next start.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections import deque
from collections.abc import Callable
from pathlib import Path

from miles_core.agent_server.protocol import valid_id

REMOVED = ".removed-"


class Retention:
    """Keeps at most `keep` ended trials under `root`."""

    def __init__(self, root: Path, keep: int) -> None:
        self._root = root
        self._keep = keep
        self._ended: deque[str] = deque()
        self._work: set[asyncio.Task[None]] = set()
        self.watchers: list[Callable[[str], None]] = []
        """Called with the id of each trial that is removed."""

    def open(self) -> None:
        """Take over what is there, the oldest first, and remove what is too much."""
        found = []
        for entry in os.scandir(self._root):
            if entry.name.startswith(REMOVED):
                self._remove(Path(entry.path))
            elif valid_id(entry.name):
                with contextlib.suppress(OSError):
                    found.append((os.stat(f"{entry.path}/result.json").st_mtime, entry.name))
        self._ended.extend(name for _, name in sorted(found))
        self._shrink()

    def ended(self, trial_id: str) -> None:
        """A trial has ended and its result was kept."""
        self._ended.append(trial_id)
        self._shrink()

    def _shrink(self) -> None:
        while len(self._ended) > self._keep:
            trial_id = self._ended.popleft()
            hidden = self._root / f"{REMOVED}{trial_id}"
            with contextlib.suppress(FileNotFoundError):
                os.replace(self._root / trial_id, hidden)
                self._remove(hidden)
            for watcher in self.watchers:
                watcher(trial_id)

    def _remove(self, directory: Path) -> None:
        task = asyncio.create_task(asyncio.to_thread(shutil.rmtree, directory, True))
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    async def close(self) -> None:
        """Wait until what was begun to be removed is gone."""
        await asyncio.gather(*self._work)
