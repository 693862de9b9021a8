"""Waiting for work while everything that it needs lives, and until someone asks to stop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

STOP_LAG_S = 1.0


class Interrupted(Exception):
    """The attempt was asked to stop; what was trained is saved."""


class Guard:
    """`watches`: each waits until something died and raises what says so.

    `stop` is set once the attempt is asked to end.
    """

    def __init__(
        self, stop: asyncio.Event, watches: list[Callable[[], Coroutine[Any, Any, object]]]
    ) -> None:
        self._stop, self._watches = stop, watches

    async def wait(self, work: Coroutine[Any, Any, T], interruptible: bool = False) -> T:
        """The result of `work`; raises what a watch raises once it does.

        A stop request ends interruptible work at once, with Interrupted. Other work is waited for,
        so that nothing is half done.
        """
        task = asyncio.ensure_future(work)
        watches = [asyncio.ensure_future(watch()) for watch in self._watches]
        waits: set[asyncio.Future[Any]] = {task, *watches}
        if interruptible:
            waits.add(asyncio.ensure_future(self._stop.wait()))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            ended = [watch for watch in watches if watch.done()]
            if ended and not await self._asked_to_stop():
                ended[0].result()
            raise Interrupted
        finally:
            for other in waits:
                other.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def _asked_to_stop(self) -> bool:
        """Whether a stop request came, or comes at once: it may reach the services first."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_LAG_S):
                await self._stop.wait()
        return self._stop.is_set()
