"""The calls of a session: running ones, and answers kept for clients that ask twice."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from miles_core.sessions.errors import ApiError, session_gone

_MOST_KEPT = 64


class Call:
    """One model call that somebody waits for; it is cancelled when nobody does any more.

    `rid` names it at the engine, in its answer and in the samples. `settled` is what of the answer
    is certain while it is sampled: reasoning and content. `seen`: a client was there to have it.
    """

    def __init__(self, digest: bytes, wants_progress: bool) -> None:
        self.rid = uuid.uuid4().hex
        self.digest = digest
        self.wants_progress = wants_progress
        self.settled = ("", "")
        self.seen = False
        self.ended_by = session_gone()
        self.task: asyncio.Task[dict[str, Any]]
        self._waiting = 0
        self._moved = asyncio.Event()

    def settle(self, reasoning: str, content: str) -> None:
        """Tell who follows how far the answer is."""
        self.settled = (reasoning, content)
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    @contextlib.asynccontextmanager
    async def waited_for(self) -> AsyncIterator[None]:
        """While at least one client is inside, the call goes on."""
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1
            if not self._waiting and not self.task.done():
                self.task.cancel()
                await asyncio.wait({self.task})

    async def result(self) -> dict[str, Any]:
        """The completion; raises `ApiError`."""
        try:
            return await asyncio.shield(self.task)
        except asyncio.CancelledError:
            if self.task.cancelled():
                raise self.ended_by from None
            raise

    async def progress(self, gone: asyncio.Task[None]) -> AsyncIterator[tuple[str, str]]:
        """What is settled, each time that there is more, until the call or `gone` has ended."""
        while not self.task.done() and not gone.done():
            moved = asyncio.ensure_future(self._moved.wait())
            try:
                await asyncio.wait({moved, self.task, gone}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                moved.cancel()
            if moved.done() and not moved.cancelled():
                yield self.settled


class Calls:
    """What runs in a session, and the last answers by the key that their client gave them."""

    def __init__(self) -> None:
        self.running: set[Call] = set()
        self._keyed: OrderedDict[str, Call] = OrderedDict()

    def start(
        self,
        key: str | None,
        digest: bytes,
        wants_progress: bool,
        run: Callable[[Call], Coroutine[Any, Any, dict[str, Any]]],
    ) -> Call:
        """Start a call, or join the one that has this `key`. Raises `ApiError`.

        `digest` tells requests apart: a key stands for one request.
        """
        known = self._keyed.get(key) if key is not None else None
        if known is not None and not _failed(known.task):
            if known.digest != digest:
                raise ApiError(
                    409, "idempotency_conflict", "this Idempotency-Key stands for another request"
                )
            return known
        call = Call(digest, wants_progress)
        call.task = asyncio.create_task(run(call))
        self.running.add(call)
        call.task.add_done_callback(lambda task: self._ended(call, task))
        if key is not None:
            self._keyed[key] = call
            self._keyed.move_to_end(key)
            while len(self._keyed) > _MOST_KEPT:
                self._keyed.popitem(last=False)
        return call

    def _ended(self, call: Call, task: asyncio.Task[Any]) -> None:
        self.running.discard(call)
        if not task.cancelled():
            task.exception()  # whoever waits has it; else it would be logged as never retrieved

    async def cancel(self, why: ApiError) -> None:
        """End every running call, whose clients get the error `why`, and wait for its end."""
        calls = list(self.running)
        for call in calls:
            call.ended_by = why
            call.task.cancel()
        await asyncio.gather(*(call.task for call in calls), return_exceptions=True)


def _failed(task: asyncio.Task[Any]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)
