"""A watch over a rank ends when it is cancelled, whatever happens in the same moment."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from miles_core.cluster.rank import Pulse, Rank


class Actor:
    """Stands for a Ray actor: its pulse is answered when the test says so."""

    def __init__(self) -> None:
        self.asked: asyncio.Queue[asyncio.Future[Pulse]] = asyncio.Queue()

    @property
    def pulse(self) -> Actor:
        return self

    def options(self, **_: Any) -> Actor:
        return self

    def remote(self) -> asyncio.Future[Pulse]:
        answer = asyncio.get_running_loop().create_future()
        self.asked.put_nowait(answer)
        return answer


ANSWER = Pulse(pid=1, nice=0, node="another", host="host", doing="")


async def _watched(monkeypatch: pytest.MonkeyPatch) -> tuple[asyncio.Task[None], Actor]:
    """A watch that waits for its second answer, with a limit on it."""
    from miles_core.cluster import rank

    monkeypatch.setattr(rank, "PULSE_S", 0.0)
    monkeypatch.setattr(rank.ray, "get_runtime_context", lambda: Context())
    actor = Actor()
    watch = asyncio.create_task(Rank(actor, 0, 1, silence_s=30.0).watch())
    (await actor.asked.get()).set_result(ANSWER)
    return watch, actor


class Context:
    def get_node_id(self) -> str:
        return "this"


@pytest.mark.parametrize("answered", ["before", "with", "never"])
async def test_a_watch_that_is_cancelled_ends(
    monkeypatch: pytest.MonkeyPatch, answered: str
) -> None:
    watch, actor = await _watched(monkeypatch)
    pulse = await actor.asked.get()
    if answered != "never":
        pulse.set_result(ANSWER)
    if answered == "before":
        await asyncio.sleep(0)
    watch.cancel()
    done, _ = await asyncio.wait([watch], timeout=5.0)
    assert done, "the cancellation was forgotten"
    assert watch.cancelled()
