"""Which engines may be asked, as the run says it while engines fail and come back."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Iterable

from pydantic import BaseModel, ConfigDict, Field

# A run takes a failed engine out of the list within this time.
_NOTICE_S = 3.0
# How long a call waits for an engine when there is none.
_NO_ENGINE_S = 300.0


class EngineList(BaseModel):
    """Body of `PUT /engines`: who may be asked, and the weight version that they serve."""

    model_config = ConfigDict(extra="forbid")

    urls: list[str]
    weight_version: int = Field(ge=0)


class Engines:
    """The engines of a session server.

    A list that was given at the start is final unless `replace` is called: from then on somebody
    watches the engines, and calls wait for what that one does.
    """

    def __init__(self, urls: Iterable[str]) -> None:
        self._urls = [url.rstrip("/") for url in urls]
        self._watched = not self._urls
        self._changed = asyncio.Event()
        self.weight_version = 0

    def replace(self, new: EngineList) -> None:
        """Take another list."""
        self._urls = [url.rstrip("/") for url in new.urls]
        self.weight_version = new.weight_version
        self._watched = True
        self._changed.set()
        self._changed = asyncio.Event()

    def order(self, key: str) -> list[str]:
        """All engines, a session's own first: others serve it while that one is unreachable.

        Rendezvous hashing (Thaler and Ravishankar, 1998): a changed list moves few sessions.
        """
        return sorted(self._urls, key=lambda url: hashlib.sha256(f"{key} {url}".encode()).digest())

    async def next(self, key: str, failed: set[str]) -> str | None:
        """The session's engine among those that have not failed; None when there is none.

        Where the engines are watched, a list that is empty, or of failed ones alone, is given the
        time to change.
        """
        began = time.monotonic()
        while True:
            urls = [url for url in self.order(key) if url not in failed]
            if urls:
                return urls[0]
            limit = _NOTICE_S if self._urls else _NO_ENGINE_S
            left = began + limit - time.monotonic()
            if not self._watched or left <= 0:
                return None
            try:
                async with asyncio.timeout(left):
                    await self._changed.wait()
            except TimeoutError:
                continue
