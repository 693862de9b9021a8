"""Work in pieces: between them the event loop sees who else has come."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

_ROUND_S = 0.004


class Pace:
    """Spreads the calls' own work over rounds of the event loop, in the order of asking.

    An event loop runs all that is ready before it looks at its connections again: with many calls
    ready at once, a health check would wait for the work of all of them.
    """

    def __init__(self) -> None:
        self._spent = 0.0
        self._waiting = False

    @contextlib.asynccontextmanager
    async def piece(self) -> AsyncIterator[None]:
        """A piece of work of this round, or of the next one that has time left."""
        while self._spent > _ROUND_S:  # noqa: ASYNC110
            await asyncio.sleep(0)  # one round; there is no event to wait for
        if not self._waiting:
            self._waiting = True
            asyncio.get_running_loop().call_soon(self._new_round)
        started = time.perf_counter()
        try:
            yield
        finally:
            self._spent += time.perf_counter() - started

    def _new_round(self) -> None:
        self._spent = 0.0
        self._waiting = False
