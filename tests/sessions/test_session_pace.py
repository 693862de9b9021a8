"""Work in rounds: what comes meanwhile is served between the pieces, and the order is kept."""

from __future__ import annotations

import asyncio
import time

from miles_core.sessions.pace import Pace


def busy() -> None:
    """Three milliseconds in which nothing else can run."""
    time.sleep(0.003)


async def test_others_get_their_turn_between_pieces() -> None:
    pace, order = Pace(), []

    async def work(number: int) -> None:
        async with pace.piece():
            busy()
            order.append(number)

    async def check() -> None:
        await asyncio.sleep(0)
        order.append("health")

    tasks = [asyncio.create_task(work(number)) for number in range(10)]
    tasks.append(asyncio.create_task(check()))
    await asyncio.gather(*tasks)
    numbers = [entry for entry in order if entry != "health"]
    assert numbers == list(range(10))
    assert order.index("health") < 5, "a check waits for one round, not for all the work"


async def test_a_failing_piece_counts_and_stops_nobody() -> None:
    pace, done = Pace(), []

    async def work(number: int) -> None:
        async with pace.piece():
            busy()
            if number % 2:
                raise ValueError(number)
            done.append(number)

    results = await asyncio.gather(*(work(n) for n in range(6)), return_exceptions=True)
    assert done == [0, 2, 4] and [type(r) for r in results[1::2]] == [ValueError] * 3
