"""Ends what no running trial owns: at the start of a server, while it runs, and when it ends."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable
from pathlib import Path

from miles_core.agent_server.reaper.kinds import kinds_of, warning
from miles_core.agent_server.reaper.left import Kind, KindFailed, Left
from miles_core.agent_server.reaper.owner import Owner, tag

LOOK_EVERY_S = 60.0
SWEEP_LIMIT_S = 120.0
ROUNDS = 3

log = logging.getLogger(__name__)


class Reaper:
    """Looks after the sandboxes of one trials directory.

    `live` gives the ids of the trials that this server runs. A sandbox of another trial is ended at
    the second look that finds it, since the first may have come while its trial was just ending,
    or at once when it is older than a trial may become (`lifetime_s`).
    """

    def __init__(
        self,
        kinds: Iterable[Kind],
        live: Callable[[], Iterable[str]],
        lifetime_s: float = math.inf,
    ) -> None:
        self._kinds = list(kinds)
        self._live = live
        self._lifetime_s = lifetime_s
        self._seen: set[tuple[str, str]] = set()
        self.problems: list[str] = []
        """What went wrong at the last look."""
        self._looking: asyncio.Task[None] | None = None

    async def find(self) -> list[Left]:
        """The sandboxes that no running trial owns; what went wrong is in `problems`."""
        found: list[Left] = []
        self.problems = []
        for kind in self._kinds:
            try:
                found += await kind.find()
            except Exception as error:  # of whatever kind, the others are looked for
                told = _told(error)
                self.problems.append(f"sandboxes of {kind.name} were not looked for: {told}")
        owned = {tag(trial_id) for trial_id in self._live()}
        return [left for left in found if left.tag not in owned]

    async def sweep(self) -> list[Left]:
        """End all of them now; returns those that were ended.

        More than one round finds what was being made meanwhile, and what another still used.
        """
        ended: dict[tuple[str, str], Left] = {}
        try:
            async with asyncio.timeout(SWEEP_LIMIT_S):
                for _ in range(ROUNDS):
                    found = await self.find()
                    if not found:
                        break
                    ended |= {(left.kind, left.id): left for left in await self._end(found)}
        except TimeoutError:
            self.problems.append(f"the sweep of sandboxes took more than {SWEEP_LIMIT_S:.0f} s")
        self._tell()
        return list(ended.values())

    async def look(self) -> list[Left]:
        """End those that have been without a trial long enough; returns them."""
        found = await self.find()
        due = [
            left
            for left in found
            if (left.kind, left.id) in self._seen or (left.age_s or 0.0) > self._lifetime_s
        ]
        self._seen = {(left.kind, left.id) for left in found}
        return await self._end(due)

    def start(self) -> None:
        """Look from time to time from now on."""
        if self._kinds:
            self._looking = asyncio.create_task(self._keep_looking(), name="reaper")

    async def close(self) -> list[Left]:
        """Look no more, and end what is there now that all trials have ended."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait([self._looking])
        return await self.sweep()

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            ended = await self.look()
            self._tell()
            for left in ended:
                log.warning("ended the sandbox %s (%s) of no running trial", left.id, left.content)

    async def _end(self, found: list[Left]) -> list[Left]:
        kinds = {kind.name: kind for kind in self._kinds}
        ended = []
        for left in found:
            try:
                await kinds[left.kind].remove(left)
                ended.append(left)
            except Exception as error:  # the others are ended
                self.problems.append(f"the sandbox {left.id} could not be ended: {_told(error)}")
        return ended

    def _tell(self) -> None:
        for problem in self.problems:
            log.warning(problem)


def _told(error: Exception) -> str:
    """What went wrong; for what no kind foresaw, with its class."""
    return str(error) if isinstance(error, KindFailed) else repr(error)


async def open_reaper(
    owner: Owner,
    live: Callable[[], Iterable[str]],
    lifetime_s: float,
    cgroups: Iterable[Path] = (),
) -> Reaper:
    """Sweep up what an earlier server left, tell what a person must know, look from then on.

    `cgroups` are where this server has those of its own bubblewrap sandboxes.
    """
    kinds, unlisted = kinds_of(owner, cgroups)
    for kind in unlisted:
        print(warning(kind))
    reaper = Reaper(kinds, live, lifetime_s)
    for left in await reaper.sweep():
        print(f"ended the {left.kind} sandbox {left.id} ({left.content}) of an earlier server")
    reaper.start()
    return reaper
