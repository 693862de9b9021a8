"""How weights get from the trainer to engines: shared memory, a broadcast, or a directory.

Each sends the same tensors, and drops the engines that fail on the way.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miles_core.cluster.engine_pool import EnginePool, Member
from miles_core.engines.client import EngineError, EngineGone
from miles_core.engines.weight_client import GROUP, WeightClient
from miles_core.errors import UserError
from miles_core.weights.digest import state_digest

JOIN_S = 60.0
SEND_S = 600.0

Call = Callable[..., Awaitable[Any]]
"""A collective call of a method of the trainer's WeightSender; the answer of rank 0."""
Named = tuple[str, list[int], str]


@dataclass(frozen=True, eq=False)
class Target:
    """An engine that is being pushed to."""

    member: Member
    client: WeightClient


Action = Callable[[WeightClient, int], Awaitable[Any]]


@dataclass
class Sent:
    """Who has all of it, the digest of each tensor that was sent, and the bytes of them."""

    targets: list[Target] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)
    size: int = 0


@dataclass(frozen=True)
class Order:
    """What to send. `base`: the digest of what the engines hold, of which only what can have
    changed since is sent; None: everything is."""

    version: int
    dtype: str | None
    base: str | None = None


async def failures(targets: list[Target], action: Action) -> dict[Target, EngineError]:
    """Run `action(client, number)` for all at once; who failed, and how."""
    results = await asyncio.gather(
        *(action(target.client, number) for number, target in enumerate(targets)),
        return_exceptions=True,
    )
    found: dict[Target, EngineError] = {}
    for target, result in zip(targets, results, strict=True):
        if isinstance(result, EngineError):
            found[target] = result
        elif isinstance(result, BaseException):
            raise result
    return found


class Transport(ABC):
    """One way to send."""

    name: str

    def __init__(self, call: Call, pool: EnginePool) -> None:
        self._call = call
        self._pool = pool

    @abstractmethod
    async def send(self, order: Order, targets: list[Target]) -> Sent:
        """Let the targets serve the ordered version; those that fail are taken out."""

    async def _each(self, targets: list[Target], action: Action) -> list[Target]:
        """Those of the targets for which `action` succeeds."""
        failed = await failures(targets, action)
        await self._drop(failed)
        return [target for target in targets if target not in failed]

    async def _drop(self, failed: dict[Target, EngineError]) -> None:
        for target, error in failed.items():
            await self._pool.fail(target.member, str(error), target.client)


class _Streamed(Transport):
    """Bucket by bucket, within an update that the engine opens and closes."""

    async def send(self, order: Order, targets: list[Target]) -> Sent:
        sent = Sent()
        plan = await self._call("begin", order.dtype, order.base is not None)
        try:
            targets = await self._each(targets, lambda c, _: c.begin(order.version, order.base))
            targets = await self._open(targets)
            for number, tensors in enumerate(plan["buckets"]):
                if not targets:
                    return Sent()
                targets, digests = await self._bucket(number, tensors, targets)
                sent.digests |= digests
            sent.size = plan["total"]
            digest, count = state_digest(sent.digests), len(sent.digests)
            sent.targets = await self._each(
                targets, lambda c, _: c.end(order.version, digest, count, sent.size)
            )
        finally:
            await self._call("end")
        return sent

    async def _open(self, targets: list[Target]) -> list[Target]:
        return targets

    @abstractmethod
    async def _bucket(
        self, number: int, tensors: list[Named], targets: list[Target]
    ) -> tuple[list[Target], dict[str, str]]:
        """Who took the bucket, and the digests of its tensors."""


class Shared(_Streamed):
    """Through shared memory of one machine."""

    name = "shm"

    async def _bucket(
        self, number: int, tensors: list[Named], targets: list[Target]
    ) -> tuple[list[Target], dict[str, str]]:
        answer = await self._call("share", number, len(targets))
        payloads = answer["payloads"]
        left = await self._each(targets, lambda client, i: client.take(payloads[i]))
        return left, answer["digests"]


class _GroupBroken(Exception):
    """The group is of no use any more; `left` are the engines with which it may be tried again."""

    def __init__(self, left: list[Target]) -> None:
        super().__init__("the group of trainer and engines broke")
        self.left = left


class Broadcast(_Streamed):
    """Over a torch.distributed group of trainer rank 0 and the engines, made for each push."""

    name = "broadcast"

    def __init__(self, call: Call, pool: EnginePool, backend: str) -> None:
        super().__init__(call, pool)
        self._backend = backend

    async def send(self, order: Order, targets: list[Target]) -> Sent:
        while targets:
            members = targets
            try:
                return await super().send(order, targets)
            except _GroupBroken as broken:
                targets = broken.left
            finally:
                await failures(members, _leave)
        return Sent()

    async def _open(self, targets: list[Target]) -> list[Target]:
        count = len(targets)
        if not count:
            return []
        host, port = await self._call("host", count, JOIN_S)
        if all(target.member.same_machine for target in targets):
            host = "127.0.0.1"

        async def join(client: WeightClient, number: int) -> None:
            await client.join(host, port, number + 1, count + 1, self._backend, JOIN_S)

        answer, failed = await asyncio.gather(
            self._call("join", GROUP, count, self._backend, JOIN_S), failures(targets, join)
        )
        await self._settle(answer, targets, failed)
        return targets

    async def _bucket(
        self, number: int, tensors: list[Named], targets: list[Target]
    ) -> tuple[list[Target], dict[str, str]]:
        answer, failed = await asyncio.gather(
            self._call("broadcast", number),
            failures(targets, lambda client, _: client.receive(tensors)),
        )
        await self._settle(answer, targets, failed)
        return targets, answer["digests"]

    async def _settle(
        self, answer: dict[str, Any], targets: list[Target], failed: dict[Target, EngineError]
    ) -> None:
        """Take out who is to blame for a failure, after which the group cannot be used.

        One engine that is gone makes the broadcast fail at all others too, which are blamed only
        when no other is.
        """
        if not failed and "broken" not in answer:
            return
        if "broken" in answer:
            gone: dict[Target, EngineError] = {
                target: error for target, error in failed.items() if isinstance(error, EngineGone)
            }
            failed = (
                gone
                or failed
                or {
                    target: EngineError(f"the broadcast failed: {answer['broken']}")
                    for target in targets
                }
            )
        await self._drop(failed)
        raise _GroupBroken([target for target in targets if target not in failed])


async def _leave(client: WeightClient, _: int) -> None:
    with contextlib.suppress(EngineError):
        await client.leave()


class Disk(Transport):
    """A Hugging Face directory that every engine reads; always all of it."""

    name = "disk"

    def __init__(self, call: Call, pool: EnginePool, directory: Path) -> None:
        super().__init__(call, pool)
        self._directory = directory

    async def send(self, order: Order, targets: list[Target]) -> Sent:
        digests = await self._call("write", str(self._directory), order.dtype)
        sizes = [file.stat().st_size for file in self._directory.glob("*.safetensors")]
        left = await self._each(targets, lambda c, _: c.load(self._directory, order.version))
        return Sent(left, digests, sum(sizes))


def pick(wanted: str, machine: dict[str, Any], own: str, targets: list[Target]) -> str:
    """`shm`, `disk` or `broadcast`, for what is `wanted` (with `auto`).

    `machine` is what the trainer says of its own: `machine` (its id), `room` in shared memory and
    `largest`, the bytes of a bucket; `own` is the id of this machine.

    Raises UserError when shared memory is wanted and cannot be.
    """
    elsewhere = [t.member.name for t in targets if not t.member.same_machine]
    fault = None
    if machine["machine"] != own:
        fault = "trainer rank 0 runs on another machine"
    elif elsewhere:
        fault = f"{elsewhere[0]} is not known to share this machine"
    elif machine["room"] < machine["largest"]:
        fault = (
            f"/dev/shm has {machine['room']} bytes free, and a bucket takes {machine['largest']}"
        )
    if wanted == "auto":
        return "shm" if fault is None else "disk"
    if wanted == "shm" and fault is not None:
        raise UserError(
            f"update_weight_transport is shm, but {fault}",
            "Set --update-weight-transport to disk or broadcast, or to auto.",
        )
    return wanted
