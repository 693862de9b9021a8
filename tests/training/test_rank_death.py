"""A rank that dies or hangs ends the call of all ranks at once, and is named."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from trainer_helpers import CONFIG

from miles_core.cluster.rank import RankDied, RankSilent
from miles_core.cluster.trainers import TrainerGroup

LAYOUTS = {
    "dp": {},
    "tp": {"tensor_model_parallel_size": 2},
    "pp": {"pipeline_model_parallel_size": 2},
}
# far below the minutes of a collective's timeout, far above what a loaded machine needs
AT_ONCE_S = 20.0


@pytest.fixture(scope="module", autouse=True)
def head() -> Iterator[None]:
    ray.init(address="local", num_cpus=1, include_dashboard=False, logging_level="ERROR")
    yield
    ray.shutdown()


@asynccontextmanager
async def group(world: int, silence_s: float = 60, **layout: int) -> AsyncIterator[TrainerGroup]:
    """Ranks that have started; afterwards none of their processes is left."""
    trainers = TrainerGroup(replace(CONFIG, **layout), world, silence_s)
    try:
        pids = (await trainers.processes())["pids"]
        yield trainers
    finally:
        trainers.kill()
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


async def end_of(work: Any, pid: int) -> tuple[BaseException, float]:
    """The error of work of all ranks when the rank with this pid is killed in the middle of it,
    and the seconds that it took.

    The rank is stopped first, so that the others wait for it in a collective.
    """
    os.kill(pid, signal.SIGSTOP)
    task = asyncio.ensure_future(work)
    await asyncio.sleep(1.0)
    assert not task.done(), task
    os.kill(pid, signal.SIGKILL)
    started = time.monotonic()
    (error,) = await asyncio.gather(task, return_exceptions=True)
    return error, time.monotonic() - started


def phases(base: Path, rollout: Path, tmp_path: Path) -> dict[str, Callable[[TrainerGroup], Any]]:
    return {
        "train": lambda ranks: ranks.call("train", 0, str(rollout)),
        "save": lambda ranks: ranks.call("save", str(tmp_path / "checkpoint")),
        "export_hf": lambda ranks: ranks.call("export_hf", str(tmp_path / "weights")),
        "init": lambda ranks: ranks.setup(str(base), str(base), None),
    }


async def kill_one(trainers: TrainerGroup, work: Any, victim: int) -> None:
    pids = (await trainers.processes())["pids"]
    error, seconds = await end_of(work, pids[victim])
    assert isinstance(error, RankDied), repr(error)
    assert f"rank {victim} of {len(pids)} (pid {pids[victim]} on " in str(error)
    assert "was ended by SIGKILL" in str(error)
    assert seconds < AT_ONCE_S


async def test_an_error_stays_what_it_is_and_a_killed_rank_ends_the_step_of_all(
    base: Path, rollout: Path
) -> None:
    async with group(2) as trainers:
        await trainers.setup(str(base), str(base), None)
        with pytest.raises(ValueError, match="step 0, not 1"):
            await trainers.call("train", 1, str(rollout))
        assert (await trainers.call("train", 0, str(rollout)))["optimizer_steps"] == 1
        await kill_one(trainers, trainers.call("train", 0, str(rollout)), 1)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_a_killed_rank_is_named_in_every_phase_and_layout(
    base: Path, rollout: Path, tmp_path: Path, world: int, layout: str
) -> None:
    for number, (phase, work) in enumerate(phases(base, rollout, tmp_path).items()):
        async with group(world, **LAYOUTS[layout]) as trainers:
            if phase != "init":
                await trainers.setup(str(base), str(base), None)
            await kill_one(trainers, work(trainers), number % world)


async def test_a_stopped_rank_is_told_as_a_stall(base: Path, rollout: Path) -> None:
    async with group(2, silence_s=2) as trainers:
        pids = (await trainers.processes())["pids"]
        os.kill(pids[1], signal.SIGSTOP)
        with pytest.raises(RankSilent, match=f"rank 1 of 2 .pid {pids[1]} .*is stopped"):
            async with asyncio.timeout(AT_ONCE_S):
                await trainers.watch()
