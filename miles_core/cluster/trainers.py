"""The trainer's ranks as Ray actors, called together."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any

from miles_core.cluster.rank import NEWS_S, WATCH, Rank, RankActor, RankDied
from miles_core.errors import UserError
from miles_core.training.config import TrainerConfig

# Ranks share the machine's cores by threads, not by Ray's accounting; a GPU is claimed whole.
CPUS_PER_RANK = 0.01


class TrainerGroup:
    """All ranks; every call goes to all of them and fails when one fails.

    `silence_s`: longest time without a sign of life of a rank, for `watch`.
    """

    def __init__(self, config: TrainerConfig, world_size: int, silence_s: float):
        import ray

        gpus = 1 if ray.cluster_resources().get("GPU", 0) >= world_size else 0
        if config.optimizer_cpu_offload and not gpus:
            raise UserError(
                "training.optimizer_cpu_offload: Ray has no GPU for each of the "
                f"{world_size} trainer ranks, so the optimizer's state is in host memory as it is",
                "Leave --optimizer-cpu-offload out.",
            )
        options: dict[str, Any] = {"num_cpus": CPUS_PER_RANK, "num_gpus": gpus}
        options["concurrency_groups"] = {WATCH: 1}
        actor = ray.remote(**options)(RankActor)
        self._ranks = [
            Rank(actor.remote(config, number, world_size), number, world_size, silence_s)
            for number in range(world_size)
        ]

    async def processes(self) -> dict[str, list[int]]:
        """Process ids and niceness of the ranks, under `pids` and `nice`."""
        pulses = await self._together([rank.pulse() for rank in self._ranks])
        return {"pids": [p.pid for p in pulses], "nice": [p.nice for p in pulses]}

    async def setup(
        self, load: str, ref_load: str | None, critic_load: str | None
    ) -> dict[str, Any]:
        """Start all ranks from a torch_dist directory; the answer of rank 0."""
        address = await self._ranks[0].call("address")
        return (await self._on_all("setup", address, load, ref_load, critic_load))[0]

    async def call(self, method: str, *args: Any) -> Any:
        """Call `method` on every rank; the answer of rank 0.

        Raises RankDied, naming the rank, when a process has ended, else the first error of a rank.
        """
        return (await self.answers(method, *args))[0]

    async def answers(self, method: str, *args: Any) -> list[Any]:
        """As `call`, the answers of all."""
        return await self._on_all("call", method, *args)

    async def watch(self) -> None:
        """Return never; raises RankDied or RankSilent, whatever the ranks are in the middle of."""
        await self._together([rank.watch() for rank in self._ranks])

    async def _on_all(self, method: str, *args: Any) -> list[Any]:
        try:
            return await self._together([rank.call(method, *args) for rank in self._ranks])
        except RankDied:
            raise
        except Exception:
            await self._look_for_the_dead()
            raise

    async def _look_for_the_dead(self) -> None:
        """Raise RankDied when a rank is dead: to the others that is a lost connection."""
        with contextlib.suppress(TimeoutError):
            await self._together([rank.pulse(NEWS_S) for rank in self._ranks])

    @staticmethod
    async def _together(work: list[Coroutine[Any, Any, Any]]) -> list[Any]:
        """Answers of all; the first error ends the wait for the others."""
        tasks = [asyncio.ensure_future(part) for part in work]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def kill(self) -> None:
        """End the ranks' processes."""
        for rank in self._ranks:
            rank.kill()
        for rank in self._ranks:
            rank.see_it_end()
