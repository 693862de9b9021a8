"""How much of the past a server keeps: the newest ended trials, with all that they left.

A result that no client was given yet is kept for an hour at least, and one that was given for a
minute more, in which a client that lost the answer asks again. A server that was started anew knows
of no client. A removed trial is unknown when it is asked for. A directory that is being removed has
a hidden name, and what a server that was killed had begun to remove is removed at the next start.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from miles_core.agent_server.protocol import valid_id

REMOVED = ".removed-"
UNGIVEN_S = 3600.0
"""Seconds for which a result is kept that no client was given."""
GIVEN_S = 60.0
"""Seconds for which a result is kept after it was given."""
CHECK_S = 10.0


class Retention:
    """Keeps at most `keep` ended trials under `root`, and those that no client may miss yet.

    `clock` tells the seconds since 1970.
    """

    def __init__(self, root: Path, keep: int, clock: Callable[[], float] = time.time) -> None:
        self._root = root
        self._keep = keep
        self._clock = clock
        self._until: dict[str, float] = {}
        """The ended trials, the oldest first, and until when each is kept in any case."""
        self._work: set[asyncio.Task[None]] = set()
        self._checks: asyncio.Task[None] | None = None
        self.watchers: list[Callable[[str], None]] = []
        """Called with the id of each trial that is removed."""

    def open(self, unwritten: Iterable[str] = ()) -> None:
        """Take over what is there, the oldest first, and remove what is too much.

        `unwritten` are trials that have ended and may have no result on the disk yet.
        """
        found = []
        for entry in os.scandir(self._root):
            if entry.name.startswith(REMOVED):
                self._remove(Path(entry.path))
            elif valid_id(entry.name):
                with contextlib.suppress(OSError):
                    found.append((os.stat(f"{entry.path}/result.json").st_mtime, entry.name))
        self._until = {name: ended + UNGIVEN_S for ended, name in sorted(found)}
        for trial_id in unwritten:
            self._until.setdefault(trial_id, self._clock() + UNGIVEN_S)
        self.shrink()
        self._checks = asyncio.create_task(self._check(), name="retention")

    def ended(self, trial_id: str) -> None:
        """A trial has ended and its result was kept."""
        self._until[trial_id] = self._clock() + UNGIVEN_S
        self.shrink()

    def given(self, trial_id: str) -> None:
        """A client is given the result of a trial."""
        if trial_id in self._until:
            soon = self._clock() + GIVEN_S
            self._until[trial_id] = min(self._until[trial_id], soon)

    def shrink(self) -> None:
        """Remove the oldest trials that are too many and may be missed."""
        now, many = self._clock(), len(self._until) - self._keep
        if many <= 0:
            return
        over = [trial_id for trial_id, until in self._until.items() if until <= now]
        for trial_id in over[:many]:
            del self._until[trial_id]
            hidden = self._root / f"{REMOVED}{trial_id}"
            with contextlib.suppress(FileNotFoundError):
                os.replace(self._root / trial_id, hidden)
                self._remove(hidden)
            for watcher in self.watchers:
                watcher(trial_id)

    async def _check(self) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            self.shrink()

    def _remove(self, directory: Path) -> None:
        task = asyncio.create_task(asyncio.to_thread(shutil.rmtree, directory, True))
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    async def close(self) -> None:
        """Wait until what was begun to be removed is gone."""
        if self._checks is not None:
            self._checks.cancel()
        await asyncio.gather(*self._work)
