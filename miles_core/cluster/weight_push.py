"""The weight push: the trainer's weights to every engine, under a version.

An engine is paused, is sent the weights, serves them once they are whole, and goes on. One that
fails in between is taken out of the pool; the others go on. An engine that came back is given the
current weights by `keep_current` while the trainer has nothing else to do.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from miles_core.cluster.engine_pool import EnginePool
from miles_core.cluster.services import ServiceError
from miles_core.cluster.transports import (
    Broadcast,
    Disk,
    Order,
    Sent,
    Shared,
    Target,
    Transport,
    failures,
    pick,
)
from miles_core.engines.client import EngineError
from miles_core.errors import UserError
from miles_core.weights.digest import state_digest
from miles_core.weights.shared import machine_id

log = logging.getLogger("miles.attempt")

T = TypeVar("T")

POLL_S = 0.2
PROBE_S = 5.0
NO_ENGINE_S = 600.0
DTYPES = ("float32", "bfloat16")


class Trainers(Protocol):
    """The trainer's ranks."""

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of every worker; the answer of rank 0."""


@dataclass(frozen=True)
class PushSettings:
    """`transport`: auto, shm, disk or broadcast. `check_equal`: compare what is served with what
    the trainer has. `directory(version)`: where a directory for the disk transport goes."""

    transport: str
    check_equal: bool
    directory: Callable[[int], Path]


@dataclass
class Report:
    """Of one push: seconds, bytes that each engine was sent at most, engines that serve it."""

    seconds: float
    bytes: int
    engines: int
    transport: str


class WeightPush:
    """Pushes to the engines of a pool; one at a time."""

    def __init__(self, pool: EnginePool, trainers: Trainers, settings: PushSettings) -> None:
        self._pool = pool
        self._trainers = trainers
        self._settings = settings
        self._lock = asyncio.Lock()
        self._digests: dict[str, str] = {}
        self._frozen: bool | None = None

    async def push(self, version: int) -> Report:
        """Let the engines serve the trainer's weights as `version`.

        Returns when every engine that is up serves them or was taken out, and one does.

        Raises ServiceError when there was no engine for ten minutes, UserError when the settings
        cannot be followed, and what the trainer raises.
        """
        began = time.monotonic()
        self._pool.version = version
        await self._pool.tell()
        sent, name = 0, ""
        while not self._pool.current():
            if time.monotonic() - began > NO_ENGINE_S:
                raise ServiceError(f"no engine took version {version} within {NO_ENGINE_S:g} s")
            targets = self._targets()
            if targets:
                size, name = await self._give(targets)
                sent = max(sent, size)
            else:
                await asyncio.sleep(POLL_S)
        await self._pool.tell()
        self._tidy(version)
        return Report(time.monotonic() - began, sent, len(self._pool.current()), name)

    async def keep_current(self) -> None:
        """Give the current weights to engines that are back; returns never. The trainer must have
        nothing else to do meanwhile."""
        probed = time.monotonic()
        while True:
            await asyncio.sleep(POLL_S)
            if time.monotonic() - probed > PROBE_S:
                await self._pool.probe()
                probed = time.monotonic()
            if behind := self._targets():
                await self._give(behind)
                await self._pool.tell()

    async def beside(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for `work` that leaves the trainer idle; engines that come back get the current
        weights meanwhile."""
        task = asyncio.ensure_future(work)
        repairs = asyncio.ensure_future(self.keep_current())
        try:
            await asyncio.wait({task, repairs}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                repairs.result()  # it ends by an error alone
            return await task
        finally:
            for one in (task, repairs):
                one.cancel()
            await asyncio.gather(task, repairs, return_exceptions=True)

    def _targets(self) -> list[Target]:
        return [Target(m, m.client) for m in self._pool.behind() if m.client is not None]

    async def _give(self, targets: list[Target]) -> tuple[int, str]:
        """Push to these engines; bytes and transport. Generation continues in any case."""
        async with self._lock:
            paused = await failures(targets, lambda client, _: client.pause())
            for target, error in paused.items():
                await self._pool.fail(target.member, str(error), target.client)
            left = [target for target in targets if target not in paused]
            served: dict[Target, str | None] = {}
            version = self._pool.version
            try:
                told = await self._send(left, version, served)
            finally:
                # Also when this is cancelled: nobody else would end the pause.
                await asyncio.shield(failures(left, _go_on))
            # Only now may sessions be sent there.
            for target, base in served.items():
                if target.member.client is target.client:
                    target.member.version, target.member.base = version, base
            return told

    async def _send(
        self, targets: list[Target], version: int, served: dict[Target, str | None]
    ) -> tuple[int, str]:
        """Push within the pause; `served` gets who serves the version, and what of it is a base."""
        size, name = 0, ""
        dtypes = {target.client.dtype for target in targets}
        dtype = dtypes.pop() if len(dtypes) == 1 and dtypes <= set(DTYPES) else None
        for base, group in (await self._by_base(targets)).items():
            transport = await self._transport(group, dtype)
            if transport.name == "disk":
                base = None
            sent = await transport.send(Order(version, dtype, base), group)
            if sent.digests:
                known = self._digests if base is not None else {}
                self._digests = {**known, **sent.digests}
                digest = state_digest(self._digests)
                # An engine does not remember what it was sent in a directory.
                kept = None if transport.name == "disk" else digest
                served |= dict.fromkeys(await self._equal(sent, version, digest), kept)
            size, name = max(size, sent.size), transport.name
        return size, name

    async def _by_base(self, targets: list[Target]) -> dict[str | None, list[Target]]:
        """The engines that need everything (None), then those that hold the last weights, if
        some of them cannot have changed."""
        if self._frozen is None:
            self._frozen = await self._call("frozen")
        held = state_digest(self._digests) if self._frozen and self._digests else None
        groups: dict[str | None, list[Target]] = {}
        for target in targets:
            has = held is not None and target.member.base == held
            if has and not target.client.staged:
                with contextlib.suppress(EngineError):
                    has = await target.client.version() == target.member.version
            groups.setdefault(held if has else None, []).append(target)
        return dict(sorted(groups.items(), key=lambda item: item[0] is not None))

    async def _equal(self, sent: Sent, version: int, digest: str) -> list[Target]:
        """Who serves what was sent, as far as that is to be compared; others are taken out."""
        left = list(sent.targets)
        if self._settings.check_equal:
            for target in sent.targets:
                if fault := await _difference(target, version, digest):
                    left.remove(target)
                    await self._pool.fail(target.member, fault, target.client)
        return left

    async def _transport(self, targets: list[Target], dtype: str | None) -> Transport:
        machine = await self._call("machine", dtype)
        name = pick(self._settings.transport, machine, machine_id(), targets)
        able = dtype is not None and all(target.client.staged for target in targets)
        if self._settings.check_equal and not able:
            raise UserError(
                "check_weight_update_equal needs engines that tell a digest of their weights, all "
                "of one type",
                "Embedded engines do; set it to false for others.",
            )
        if name == "shm":
            return Shared(self._call, self._pool)
        if name == "disk":
            return Disk(self._call, self._pool, self._settings.directory(self._pool.version))
        cpu = not machine["cuda"] or all(target.client.staged for target in targets)
        return Broadcast(self._call, self._pool, "gloo" if cpu else "nccl")

    async def _call(self, method: str, *args: Any) -> Any:
        return await self._trainers.call("push_weights", method, *args)

    def _tidy(self, version: int) -> None:
        """Remove directories of other versions."""
        directory = self._settings.directory(version)
        if directory.parent.is_dir():
            for old in directory.parent.iterdir():
                if old != directory:
                    shutil.rmtree(old)


async def _go_on(client: Any, _: int) -> None:
    """End a pause; an update that did not come to its end is given up first."""
    await client.give_up()
    with contextlib.suppress(EngineError):
        await client.resume()


async def _difference(target: Target, version: int, digest: str) -> str | None:
    """What is wrong with what an engine serves."""
    try:
        found = await target.client.digest()
    except EngineError as error:
        return str(error)
    if found["weight_version"] != str(version) or found["digest"] != digest:
        return (
            f"serves version {found['weight_version']} with digest {found['digest']}, the "
            f"trainer has version {version} with {digest}"
        )
    return None
