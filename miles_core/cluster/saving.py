"""The checkpoints of an attempt: where it resumes, and its saves, one at a time."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

from miles_core.checkpoints import store
from miles_core.cluster.trainers import TrainerGroup
from miles_core.errors import UserError
from miles_core.runs import fold, journal
from miles_core.runs.directory import RunDir

log = logging.getLogger("miles.saving")

POLL_S = 0.2
LEAVE_S = 30.0


def resume_point(run: RunDir) -> store.Checkpoint | None:
    """The checkpoint that a run goes on from, or None for one that has not saved yet.

    Raises UserError when the run's journal says that it saved and nothing of that is left, or
    when nothing that is left is whole.
    """
    found = store.latest(run.checkpoints)
    saved = fold.fold(journal.read(run.journal)).checkpoint
    if found is None and saved is not None:
        raise UserError(
            f"the run saved after {saved} steps, but {run.checkpoints} holds no checkpoint",
            f"Put {run.checkpoints}/iter_{saved:07d} back, or begin another run (--run-name).",
        )
    if found is not None and saved is not None and found.iteration < saved:
        names = " ".join(found.passed_over)
        if f"iter_{saved:07d}" not in names:
            found.passed_over.insert(0, f"iter_{saved:07d}: it is missing")
    return found


class Saver:
    """Saves of the ranks into `root`: at most one in flight, published when all ranks have
    written their part. `published`: iteration of the newest one."""

    def __init__(
        self,
        trainers: TrainerGroup,
        root: Path,
        events: journal.Journal,
        keep: int,
        background: bool,
        published: int,
    ) -> None:
        self._trainers = trainers
        self._root = root
        self._journal = events
        self._keep = keep
        self._background = background
        self._task: asyncio.Task[None] | None = None
        self._begun = published
        self.published = published

    async def save(self, state: dict[str, Any]) -> None:
        """Save the ranks as they are now, after `state["iteration"]` steps, unless that was begun;
        returns when they may train on.

        That is at once when the save goes on in the background, else when it is published. A save
        that was begun goes on when this is cancelled. Raises what went wrong with this one or the
        one before it.
        """
        await self.settle()
        if state["iteration"] <= self._begun:
            return
        self._begun = state["iteration"]
        may_train = asyncio.Event()
        self._task = asyncio.create_task(self._save(state, may_train))
        waits = {self._task, asyncio.create_task(may_train.wait())}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        may_train.set()
        self.check()

    async def _save(self, state: dict[str, Any], may_train: asyncio.Event) -> None:
        started, iteration = time.monotonic(), state["iteration"]
        directory = await asyncio.to_thread(store.begin, self._root, iteration)
        background = await self._trainers.call("start_save", str(directory), self._background)
        if background:
            may_train.set()
            await self._written()
        known = await self._trainers.call("finish_save")
        path = await asyncio.to_thread(
            store.publish, directory, self._root, iteration, state, self._keep, known
        )
        self.published = iteration
        self._journal.append(
            "checkpoint_saved",
            iteration=iteration,
            path=str(path),
            seconds=round(time.monotonic() - started, 3),
            background=background,
        )

    async def _written(self) -> None:
        """Wait until every rank has written its part.

        A rank answers between two steps; the collective end of the save does not keep it waiting.
        """
        while True:
            if all(await self._trainers.answers("save_ended")):
                return
            await asyncio.sleep(POLL_S)

    def check(self) -> None:
        """Raise what a save in the background has failed with."""
        if self._task is not None and self._task.done():
            task, self._task = self._task, None
            task.result()

    async def settle(self) -> None:
        """Wait for the save in flight; raises what it failed with."""
        if self._task is not None:
            await asyncio.wait([self._task])
            self.check()

    async def leave(self) -> None:
        """At the end of an attempt, whatever ended it: give the save in flight some time, then
        let go of it. What it has written is removed by the next save."""
        task, self._task = self._task, None
        if task is None:
            return
        await asyncio.wait([task], timeout=LEAVE_S)
        task.cancel()
        (outcome,) = await asyncio.gather(task, return_exceptions=True)
        if outcome is not None:
            log.warning("a checkpoint was not published: %r", outcome)
