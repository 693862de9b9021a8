"""Work that is waited for beside what it needs, and stop requests."""

from __future__ import annotations

import asyncio

import pytest

from miles_core.cluster.guard import Guard, Interrupted

pytestmark = pytest.mark.asyncio


class Died(Exception):
    pass


async def forever() -> None:
    await asyncio.Event().wait()


async def dies() -> None:
    raise Died("an engine")


async def answer() -> int:
    await asyncio.sleep(0)
    return 7


@pytest.mark.parametrize("interruptible", [False, True])
async def test_the_result_comes_back_and_nothing_is_left_running(interruptible: bool) -> None:
    guard = Guard(asyncio.Event(), [forever, forever])
    assert await guard.wait(answer(), interruptible) == 7
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize("interruptible", [False, True])
async def test_what_died_ends_the_work(interruptible: bool) -> None:
    guard = Guard(asyncio.Event(), [forever, dies])
    with pytest.raises(Died, match="an engine"):
        await guard.wait(forever(), interruptible)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_an_error_of_the_work_itself_comes_first() -> None:
    async def fails() -> None:
        raise ValueError("of the work")

    with pytest.raises(ValueError, match="of the work"):
        await Guard(asyncio.Event(), [forever]).wait(fails())


async def test_a_stop_request_ends_interruptible_work_alone() -> None:
    stop = asyncio.Event()
    guard = Guard(stop, [forever])
    waiting = asyncio.ensure_future(guard.wait(forever(), interruptible=True))
    await asyncio.sleep(0)
    stop.set()
    with pytest.raises(Interrupted):
        await waiting
    assert await guard.wait(answer()) == 7


@pytest.mark.parametrize("interruptible", [False, True])
async def test_a_death_just_before_the_stop_request_counts_as_the_stop(interruptible: bool) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().call_later(0.05, stop.set)
    with pytest.raises(Interrupted):
        await Guard(stop, [dies]).wait(forever(), interruptible)
