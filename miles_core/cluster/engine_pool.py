"""The engines of an attempt: which of them live, and which serve the current weights.

Sessions are told of those alone that do. An engine that fails is taken out with an alarm, started
anew when it is the run's own, and comes back once it has been given the current weights.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from miles_core.cluster.services import Service, ServiceError
from miles_core.engines.client import EngineError
from miles_core.engines.weight_client import WeightClient

log = logging.getLogger("miles.attempt")

MOST_RESTARTS = 5
RESTARTS_WITHIN_S = 600.0
READY_S = 180.0
# How long an engine that has failed is left alone before it is tried again.
REST_S = 5.0
LOAD_S = 600.0

Alarm = Callable[[str, str], None]
Route = Callable[[list[str], int], Awaitable[None]]


@dataclass(eq=False)
class Member:
    """One engine. `version` is the one that it is known to serve, `base` the digest of all tensors
    that it was sent; `client` is None while it has no address."""

    name: str
    service: Service | None = None
    client: WeightClient | None = None
    version: int | None = None
    base: str | None = None
    out: bool = False
    given_up: bool = False
    rest_until: float = 0.0
    started: float = 0.0

    @property
    def url(self) -> str:
        return "" if self.client is None else self.client.url

    @property
    def same_machine(self) -> bool:
        """Whether it shares the memory of this machine."""
        return self.service is not None or (urlsplit(self.url).hostname or "").startswith(
            ("127.", "localhost", "::1")
        )

    def forget(self) -> None:
        """What was known of its weights does not hold any more."""
        self.version, self.base = None, None


class EnginePool:
    """`services` are the run's own engines, `urls` those of others.

    `on_alarm(kind, detail)` is told when an engine leaves (`engine_out`) and returns
    (`engine_back`), `route(urls, version)` whenever those change that may be asked.
    """

    def __init__(
        self, services: list[Service], urls: list[str], on_alarm: Alarm, route: Route
    ) -> None:
        self.members = [Member(service.name, service) for service in services]
        self.members += [Member(url, client=WeightClient(url, LOAD_S)) for url in urls]
        self.version = 0
        self._on_alarm = on_alarm
        self._route = route
        self._restarts: list[float] = []
        self._routed: tuple[list[str], int] | None = None

    def start(self) -> None:
        """Start the run's own engines."""
        for member in self.members:
            if member.service is not None:
                member.service.start()
                member.started = time.monotonic()

    async def wait(self) -> None:
        """Wait until every engine serves; raises ServiceError, UserError or EngineError when one
        does not."""
        for member in self.members:
            if member.service is not None:
                url = await member.service.wait_ready(READY_S)
                member.client = member.client or WeightClient(url, LOAD_S)
            assert member.client is not None
            await member.client.look()

    def able(self) -> list[Member]:
        """Engines that weights can be pushed to now."""
        now = time.monotonic()
        return [m for m in self.members if m.client is not None and now >= m.rest_until]

    def behind(self) -> list[Member]:
        """Of those, the ones without the current weights."""
        return [member for member in self.able() if member.version != self.version]

    def current(self) -> list[Member]:
        """Engines that serve the current weights."""
        return [m for m in self.members if m.client is not None and m.version == self.version]

    async def fail(self, member: Member, reason: str, client: WeightClient | None = None) -> None:
        """Take an engine out until it is given the current weights; the run's own is restarted.

        `client` is the one that failed; a restart since then has dealt with it already.
        Raises ServiceError when no engine is left and this one was restarted too often.
        """
        if client is not None and member.client is not client:
            return
        member.forget()
        member.rest_until = time.monotonic() + REST_S
        if not member.out:
            member.out = True
            log.warning("%s is taken out: %s", member.name, reason)
            self._on_alarm("engine_out", f"{member.name}: {reason}")
        if member.service is not None:
            old, member.client = member.client, None
            self._restart(member, member.service)
            if old is not None:
                await old.close()
        await self.tell()

    async def tell(self) -> None:
        """Let sessions ask those engines that serve the current weights, when these changed."""
        current = self.current()
        wanted = ([member.url for member in current], self.version)
        if wanted != self._routed:
            await self._route(*wanted)
            self._routed = wanted
        for member in current:
            if member.out:
                member.out = False
                self._on_alarm("engine_back", f"{member.name} serves version {self.version}")

    async def check(self) -> None:
        """Take out and restart engines that have ended, and note those that are ready again.

        Raises ServiceError or UserError when an engine cannot be kept up and no other serves.
        """
        for member in self.members:
            service = member.service
            if service is None or member.given_up:
                continue
            if service.ended_with() is not None:
                try:
                    service.check()
                except ServiceError as error:
                    await self.fail(member, str(error))
            elif member.client is None and service.ready_file.exists():
                url = str(json.loads(service.ready_file.read_text())["url"])
                client = WeightClient(url, LOAD_S)
                try:
                    await client.look()
                except EngineError as error:
                    await client.close()
                    await self.fail(member, str(error))
                else:
                    member.client, member.rest_until = client, 0.0
            elif member.client is None and time.monotonic() - member.started > READY_S:
                await self.fail(member, f"was not ready after {READY_S:g} s")
        await self.tell()

    async def probe(self) -> None:
        """Take out engines of others that cannot be reached or serve something else."""
        for member in self.current():
            if member.service is None and member.client is not None:
                try:
                    version = await member.client.version()
                except EngineError as error:
                    await self.fail(member, str(error))
                else:
                    if version != member.version:
                        await self.fail(member, f"serves version {version}, as after a restart")

    def _restart(self, member: Member, service: Service) -> None:
        service.kill()
        now = time.monotonic()
        self._restarts = [t for t in self._restarts if now - t < RESTARTS_WITHIN_S]
        if len(self._restarts) < MOST_RESTARTS:
            self._restarts.append(now)
            _reseed(service)
            service.start()
            member.started = now
            return
        member.given_up = True
        if all(m.given_up for m in self.members):
            raise ServiceError(
                f"{member.name} failed again after {MOST_RESTARTS} restarts of engines within "
                f"{RESTARTS_WITHIN_S:g} s, and no engine is left; see {service.log}"
            )
        self._on_alarm("engine_given_up", f"{member.name}: engines were restarted too often")

    def stop(self) -> None:
        """End the run's own engines."""
        for member in self.members:
            if member.service is not None:
                member.service.stop()
        self.members = []


def _reseed(service: Service) -> None:
    """Give a restarted engine other random numbers than it has used."""
    if "--seed" in service.argv:
        place = service.argv.index("--seed") + 1
        service.argv[place] = str(int(service.argv[place]) + 100)
