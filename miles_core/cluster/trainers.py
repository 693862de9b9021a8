"""The trainer's ranks as Ray actors, called together."""

from __future__ import annotations

import asyncio
from typing import Any

from miles_core.training.config import TrainerConfig

# Ranks share the machine's cores by threads, not by Ray's accounting; a GPU is claimed whole.
CPUS_PER_RANK = 0.01


class RankActor:
    """One rank in a process of its own. Torch is imported there, not in the driver."""

    def __init__(self, config: TrainerConfig, rank: int, world_size: int):
        self._config = config
        self._rank = rank
        self._world_size = world_size
        self._worker: Any = None

    def process(self) -> tuple[int, int]:
        """Process id and niceness, for the run's record of what it started."""
        import os

        return os.getpid(), os.getpriority(os.PRIO_PROCESS, 0)

    def address(self) -> tuple[str, int]:
        """Host and free port where rank 0 will wait for the others."""
        import socket

        import ray

        host = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((host, 0))
            return host, probe.getsockname()[1]

    def setup(self, address: tuple[str, int], load: str, ref_load: str | None) -> dict[str, Any]:
        """Join the group, build the model and load it."""
        from miles_core.training.worker import TrainerWorker

        self._worker = TrainerWorker(self._config, self._rank, self._world_size, *address)
        return self._worker.init(load=load, ref_load=ref_load)

    def call(self, method: str, *args: Any) -> Any:
        """One method of the worker."""
        return getattr(self._worker, method)(*args)


class TrainerGroup:
    """All ranks; every call goes to all of them and fails when one fails."""

    def __init__(self, config: TrainerConfig, world_size: int):
        import ray

        gpus = 1 if ray.cluster_resources().get("GPU", 0) >= world_size else 0
        actor = ray.remote(num_cpus=CPUS_PER_RANK, num_gpus=gpus)(RankActor)
        self._ranks: list[Any] = [
            actor.remote(config, rank, world_size) for rank in range(world_size)
        ]

    async def processes(self) -> dict[str, list[int]]:
        """Process ids and niceness of the ranks, under `pids` and `nice`."""
        answers = await asyncio.gather(*(rank.process.remote() for rank in self._ranks))
        return {"pids": [pid for pid, _ in answers], "nice": [nice for _, nice in answers]}

    async def setup(self, load: str, ref_load: str | None) -> dict[str, Any]:
        """Start all ranks from a torch_dist directory; the answer of rank 0."""
        address = await self._ranks[0].address.remote()
        answers = await asyncio.gather(
            *(rank.setup.remote(address, load, ref_load) for rank in self._ranks)
        )
        return answers[0]

    async def call(self, method: str, *args: Any) -> Any:
        """Call `method` on every rank; the answer of rank 0."""
        answers = await asyncio.gather(*(rank.call.remote(method, *args) for rank in self._ranks))
        return answers[0]

    def kill(self) -> None:
        """End the ranks' processes."""
        import ray

        for rank in self._ranks:
            ray.kill(rank)
