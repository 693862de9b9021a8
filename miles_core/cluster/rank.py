"""One trainer rank seen from the driver: its calls, its signs of life, and how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError

from miles_core.cluster.process_end import ProcessEnd, describe

PULSE_S = 0.5
# How long a failed call waits for the news that another rank has died: its peers fail first.
NEWS_S = 3.0
WATCH = "watch"
"""Group of threads of an actor, for `pulse` alone."""


class RankDied(RuntimeError):
    """The process of a trainer rank has ended."""


class RankSilent(RuntimeError):
    """A trainer rank gives no sign of life."""


@dataclass(frozen=True)
class Pulse:
    """A sign of life: where the rank runs and the method that it is in ("" between two calls)."""

    pid: int
    nice: int
    node: str
    host: str
    doing: str


class RankActor:
    """One rank in a process of its own. Torch is imported there, not in the driver.

    `pulse` has a thread of its own, so it answers while another method works.
    """

    def __init__(self, config: Any, rank: int, world_size: int):
        self._config = config
        self._rank = rank
        self._world_size = world_size
        self._worker: Any = None
        self._listener: int | None = None
        self._doing = ""

    def pulse(self) -> Pulse:
        """A sign of life."""
        import os

        context = ray.get_runtime_context()
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        host = ray.util.get_node_ip_address()
        return Pulse(os.getpid(), nice, context.get_node_id(), host, self._doing)

    def address(self) -> tuple[str, int]:
        """Host and port where rank 0 waits for the others; it listens there from now on, so that
        nobody else takes the port."""
        import socket

        host = ray.util.get_node_ip_address()
        listener = socket.create_server((host, 0), backlog=max(128, self._world_size))
        port: int = listener.getsockname()[1]
        self._listener = listener.detach()  # the store of rank 0 takes it over
        return host, port

    def setup(
        self, address: tuple[str, int], load: str, ref_load: str | None, critic_load: str | None
    ) -> dict[str, Any]:
        """Join the group, build the model and load it."""
        with self._in("init"):
            from miles_core.training.worker import TrainerWorker

            self._worker = TrainerWorker(
                self._config, self._rank, self._world_size, *address, self._listener
            )
            answer: dict[str, Any] = self._worker.init(load, ref_load, critic_load)
            return answer

    def call(self, method: str, *args: Any) -> Any:
        """One method of the worker."""
        with self._in(method):
            return getattr(self._worker, method)(*args)

    @contextlib.contextmanager
    def _in(self, method: str) -> Iterator[None]:
        self._doing = method
        try:
            yield
        finally:
            self._doing = ""


class Rank:
    """The driver's handle of one rank. `silence_s`: longest time without a sign of life, once
    there was a first one."""

    def __init__(self, actor: Any, number: int, world_size: int, silence_s: float) -> None:
        self.actor = actor
        self._number = number
        self._world_size = world_size
        self._silence_s = silence_s
        self._pulse: Pulse | None = None
        self._end: ProcessEnd | None = None

    async def call(self, method: str, *args: Any) -> Any:
        """The answer of an actor's method; RankDied when its process ended meanwhile."""
        try:
            return await getattr(self.actor, method).remote(*args)
        except RayActorError as error:
            raise self._died(error) from error

    async def pulse(self, timeout_s: float | None = None) -> Pulse:
        """A sign of life. Raises RankDied or, after the time, TimeoutError."""
        asked = time.monotonic()
        while True:
            try:
                async with asyncio.timeout(timeout_s):
                    pulse = await self.actor.pulse.options(concurrency_group=WATCH).remote()
            except ActorUnavailableError:  # no connection; whether it is dead shows soon
                if timeout_s is not None and time.monotonic() - asked > timeout_s:
                    raise TimeoutError from None
                await asyncio.sleep(0.1)
                continue
            except RayActorError as error:
                raise self._died(error) from error
            self._heard(pulse)
            return pulse

    def _heard(self, pulse: Pulse) -> None:
        if self._pulse is None and pulse.node == ray.get_runtime_context().get_node_id():
            self._end = ProcessEnd(pulse.pid)
        self._pulse = pulse

    async def watch(self) -> None:
        """Return never; raises RankDied, or RankSilent after `silence_s` without an answer."""
        while True:
            try:
                await self.pulse(None if self._pulse is None else self._silence_s)
            except TimeoutError:
                raise self._silent() from None
            await asyncio.sleep(PULSE_S)

    def kill(self) -> None:
        """Ask Ray to end the process."""
        ray.kill(self.actor)

    def see_it_end(self) -> None:
        """Wait for the end that was asked for; a process of this machine is made to end."""
        if self._end is not None:
            self._end.kill(within_s=1.0)
            self._end.close()
            self._end = None

    def __str__(self) -> str:
        name = f"rank {self._number} of {self._world_size}"
        if self._pulse is None:
            return f"{name} (not started)"
        doing = f", in {self._pulse.doing}" if self._pulse.doing else ""
        return f"{name} (pid {self._pulse.pid} on {self._pulse.host}{doing})"

    def _silent(self) -> RankSilent:
        state = self._end.state() if self._end is not None else ""
        seen = f"; its process is {state}" if state else ""
        return RankSilent(
            f"trainer {self} gave no sign of life for {self._silence_s:g} s "
            f"(cluster.rank_silence_s){seen}"
        )

    def _died(self, error: RayActorError) -> RankDied:
        status = self._end.status(NEWS_S) if self._end is not None else None
        text = f"trainer {self} {describe(status)}"
        if status is None:
            text += f": {_ray_says(error)}"
        if "running low on memory" in str(error):
            text += "; Ray ended it because the machine ran out of memory"
        elif self._end is not None and self._end.out_of_memory():
            text += (
                "; the kernel ended a process for lack of memory meanwhile: "
                "lower --max-tokens-per-gpu, set --recompute, or use more ranks"
            )
        return RankDied(text)


def _ray_says(error: RayActorError) -> str:
    """What Ray knows of the end, without its guesses at the reason."""
    text = " ".join(str(error).split())
    _, found, detail = text.partition("Worker exit detail: ")
    return (detail if found else text).partition(" Some common causes")[0][:300]
