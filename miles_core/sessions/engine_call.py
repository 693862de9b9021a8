"""One model call at an engine that has SGLang's routes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np
import orjson

from miles_core.sessions.generation import (
    ContextRefused,
    EngineFailure,
    Generation,
    WantedExperts,
    ids_so_far,
    read_generation,
)
from miles_core.sessions.routing import Engines

# How often a stream is looked at, and how many events it may have, about: engines repeat the whole
# answer with each event.
_LOOK_S = 0.05
_EVENTS = 512
_CONNECT_S = 5.0
_ABORT_S = 3.0
_LONGEST_EVENT = 256 * 2**20
# How many engines may break off one call: the call itself may be what breaks them.
_BROKEN_OFF = 2


class EngineUnable(EngineFailure):
    """The engine cannot serve now; another may be asked."""


@dataclass(frozen=True)
class EngineRequest:
    """What an engine is asked: continue `input_ids` (int32) of the session `key`."""

    key: str
    rid: str
    input_ids: np.ndarray
    sampling_params: dict[str, Any]
    experts: WantedExperts | None = None

    def body(self, stream: bool) -> bytes:
        body = {
            "rid": self.rid,
            "input_ids": self.input_ids,
            "sampling_params": self.sampling_params,
            "return_logprob": True,
            "stream": stream,
        }
        if stream:
            interval = max(4, self.sampling_params["max_new_tokens"] // _EVENTS)
            body["sampling_params"] = {**self.sampling_params, "stream_interval": interval}
        if self.experts is not None:
            first = self.experts.first
            body |= {"return_routed_experts": True, "routed_experts_start_len": first}
        return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)


class EngineCaller:
    """Calls engines; a session stays with one of them, where its prefix is cached.

    Must be made in a running event loop. `timeout_s` is for a whole call.
    """

    def __init__(self, urls: list[str], timeout_s: float) -> None:
        self.engines = Engines(urls)
        self._timeout_s = timeout_s
        self._http: aiohttp.ClientSession | None = None

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            self._http = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=4.0),
                timeout=aiohttp.ClientTimeout(total=self._timeout_s, sock_connect=_CONNECT_S),
                read_bufsize=2**20,
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding"),
            )
        return self._http

    async def generate(
        self, request: EngineRequest, on_ids: Callable[[list[int]], None] | None = None
    ) -> Generation:
        """Sample a continuation; raises `EngineFailure`, `ContextRefused`.

        With `on_ids` the answer is streamed, and its ids so far are reported now and then. A call
        that is cancelled or takes too long is aborted at the engine. An engine that cannot be
        reached, breaks off before anything was reported, or cannot serve, is not asked again:
        another one is.
        """
        failed: set[str] = set()
        reported = False
        last = EngineFailure("there is no engine that serves the current weights", 503)

        def report(ids: list[int]) -> None:
            nonlocal reported
            assert on_ids is not None
            reported = True
            on_ids(ids)

        while (url := await self.engines.next(request.key, failed)) is not None:
            failed.add(url)
            try:
                return await self._generate_at(url, request, report if on_ids else None)
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
                last = EngineFailure(f"engine {url} cannot be reached: {error}")
            except TimeoutError as error:
                await self._abort(url, request.rid)
                raise EngineFailure(
                    f"engine {url} did not answer in {self._timeout_s:g} s", 503
                ) from error
            except aiohttp.ClientError as error:
                last = EngineFailure(f"engine {url} broke off: {error!r}")
                if reported or len(failed) > _BROKEN_OFF:
                    raise last from error
            except EngineUnable as error:
                last = error
            except asyncio.CancelledError:
                await asyncio.shield(self._abort(url, request.rid))
                raise
        raise last

    async def _generate_at(
        self, url: str, request: EngineRequest, on_ids: Callable[[list[int]], None] | None
    ) -> Generation:
        # The key only has to be equal for equal sessions: the secret stays here.
        version = self.engines.weight_version
        headers = {"content-type": "application/json", "X-SMG-Routing-Key": request.key}
        data = request.body(stream=on_ids is not None)
        async with self._session().post(f"{url}/generate", data=data, headers=headers) as response:
            if response.status != 200:
                text = (await response.text(errors="replace"))[:500]
                if response.status == 400 and "context length" in text:
                    raise ContextRefused(text)
                kind = EngineUnable if response.status == 503 else EngineFailure
                status = 503 if response.status in (429, 503) else 502
                raise kind(f"engine {url} answered {response.status}: {text}", status)
            if on_ids is None:
                content = await response.read()
            else:
                content = await _last_event(response, on_ids)
        try:
            answer = orjson.loads(content)
        except orjson.JSONDecodeError as error:
            raise EngineFailure(f"engine {url} answered no JSON") from error
        generation = read_generation(
            answer,
            request.sampling_params["max_new_tokens"],
            len(request.input_ids),
            request.experts,
        )
        if generation.versions[-1][0] < version:
            # Such as an engine that somebody started anew, with the weights it began with.
            raise EngineUnable(
                f"engine {url} serves version {generation.versions[-1][0]}, not {version}", 503
            )
        return generation

    async def _abort(self, url: str, rid: str) -> None:
        """Ask the engine to stop `rid`; one that cannot be reached is not waited for."""
        timeout = aiohttp.ClientTimeout(total=_ABORT_S)
        try:
            async with self._session().post(
                f"{url}/abort_request", json={"rid": rid}, timeout=timeout
            ):
                pass
        except (aiohttp.ClientError, TimeoutError):
            return

    async def aclose(self) -> None:
        if self._http is not None:
            await self._http.close()


async def _last_event(
    response: aiohttp.ClientResponse, on_ids: Callable[[list[int]], None]
) -> bytes:
    """The last event of a stream, each of which holds the whole answer so far."""
    last, looked, seen = b"", time.monotonic(), 0
    async for event in _events(response):
        last = event
        now = time.monotonic()
        if now - looked >= _LOOK_S:
            looked = now
            ids = ids_so_far(event)
            if len(ids) < seen:
                raise EngineFailure(
                    "the engine streams new ids alone: start it without incremental streaming"
                )
            seen = len(ids)
            on_ids(ids)
    return last


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The data of server-sent events (HTML standard, 9.2), up to `[DONE]`."""
    rest = bytearray()
    async for chunk in response.content.iter_any():
        rest += chunk
        if len(rest) > _LONGEST_EVENT:
            raise EngineFailure("an event of the engine's stream has no end")
        *lines, tail = rest.split(b"\n") if b"\n" in chunk else (rest,)
        rest = tail
        for line in lines:
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            if line.startswith(b"data:"):
                yield bytes(data)
