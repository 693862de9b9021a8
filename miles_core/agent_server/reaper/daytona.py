"""Sandboxes of Daytona, found by their labels and ended through its SDK.

The SDK comes with Harbor's extra `daytona`; account and address are in its own variables
(`DAYTONA_API_KEY`, `DAYTONA_API_URL`).
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any

from miles_core.agent_server.reaper.left import KindFailed, Left
from miles_core.agent_server.reaper.owner import Owner, tag

TRIALS = "miles-trials"
TRIAL = "miles-trial"
GONE = ("SandboxState.DESTROYING", "SandboxState.DESTROYED")


def labels(owner: str, trial_id: str) -> dict[str, str]:
    """The labels of a trial's sandboxes."""
    return {TRIALS: owner, TRIAL: trial_id}


class Daytona:
    """The sandboxes of one owner at Daytona."""

    name = "daytona"

    def __init__(self, owner: Owner) -> None:
        self._owner = owner

    async def find(self) -> list[Left]:
        """The owner's sandboxes; raises KindFailed."""
        async with _client() as (sdk, client):
            query = sdk.ListSandboxesQuery(labels={TRIALS: self._owner.id})
            there = [sandbox async for sandbox in client.list(query)]
        return [self._left(sandbox) for sandbox in there if str(sandbox.state) not in GONE]

    async def remove(self, left: Left) -> None:
        """Delete a sandbox; raises KindFailed."""
        async with _client() as (_, client):
            await client.delete(await client.get(left.id))

    def _left(self, sandbox: Any) -> Left:
        trial = sandbox.labels.get(TRIAL, "")
        age_s = None
        if sandbox.created_at:
            age_s = max(0.0, time.time() - datetime.fromisoformat(sandbox.created_at).timestamp())
        return Left(self.name, sandbox.id, trial, tag(trial), age_s, {"sandboxes": [sandbox.id]})


@asynccontextmanager
async def _client() -> AsyncIterator[tuple[Any, Any]]:
    """The SDK and a client of it; what goes wrong in it is KindFailed."""
    try:
        import daytona
    except ImportError as error:
        raise KindFailed("its SDK is not installed (pip install 'harbor[daytona]')") from error
    try:
        async with daytona.AsyncDaytona() as client:
            yield daytona, client
    except Exception as error:  # the SDK has its own, and those of the libraries below it
        raise KindFailed(f"{type(error).__name__}: {error}"[:300]) from error
