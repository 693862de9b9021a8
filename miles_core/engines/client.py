"""Client of rollout engines with SGLang's routes; imports no torch."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx


class EngineError(RuntimeError):
    """An engine refused a call, cannot be reached, or serves a wrong version."""


class EngineGone(EngineError):
    """An engine cannot be reached."""


class EngineClient:
    """Control and generation over one or more engines.

    `load_timeout_s` bounds a weight load on one engine, `timeout_s` every other control call;
    a generation has no time limit of its own.
    """

    def __init__(
        self, urls: Sequence[str], timeout_s: float = 30.0, load_timeout_s: float = 600.0
    ) -> None:
        if not urls:
            raise ValueError("an engine client needs at least one URL")
        self.urls = [url.rstrip("/") for url in urls]
        self.timeout_s = timeout_s
        self.load_timeout_s = load_timeout_s
        self._turn = itertools.cycle(self.urls)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._http = httpx.AsyncClient(limits=limits, trust_env=False, timeout=timeout_s)

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def wait_ready(self, timeout_s: float = 300.0, interval_s: float = 0.2) -> None:
        """Wait until every engine is healthy.

        Raises:
            EngineError: an engine was not healthy within `timeout_s` seconds.
        """
        deadline = time.monotonic() + timeout_s

        async def one(url: str) -> None:
            while True:
                try:
                    if (await self._http.get(f"{url}/health", timeout=5.0)).status_code == 200:
                        return
                    problem = "it is not healthy"
                except httpx.TransportError as error:
                    problem = _told(error)
                if time.monotonic() > deadline:
                    raise EngineError(f"engine {url} is not ready after {timeout_s:g} s: {problem}")
                await asyncio.sleep(interval_s)

        await self._all(one)

    async def weight_version(self) -> int:
        """The version that every engine serves.

        Raises:
            EngineError: engines serve different versions, or one that is not an integer.
        """
        versions = await self._all(self._version)
        if len(set(versions)) > 1:
            served = ", ".join(f"{u}: {v}" for u, v in zip(self.urls, versions, strict=True))
            raise EngineError(f"engines serve different weight versions ({served})")
        return versions[0]

    async def pause(self, mode: str = "abort") -> None:
        """Sample no token on any engine; `mode`: abort, retract or in_place what runs."""
        await self._all(lambda url: self._post(url, "/pause_generation", {"mode": mode}))

    async def resume(self) -> None:
        """End a pause."""
        await self._all(lambda url: self._post(url, "/continue_generation", {}))

    async def load(self, directory: str | Path, version: int) -> None:
        """Serve a Hugging Face directory under `version`; a pause stays.

        Raises:
            EngineError: an engine refused the load or reports another version. Those that had
                loaded before keep the new weights: call again, or restart the one that failed.
        """
        body = {
            "model_path": str(Path(directory).absolute()),
            "weight_version": str(version),
            "flush_cache": True,
            "keep_pause": True,
        }

        async def one(url: str) -> None:
            answer = await self._post(url, "/update_weights_from_disk", body, self.load_timeout_s)
            if not isinstance(answer, dict) or answer.get("success") is not True:
                raise EngineError(f"engine {url} did not load {directory}: {answer}")
            await self._expect(url, version)

        await self._all(one)

    async def abort_all(self) -> None:
        """End every request on every engine; each answers with what it has."""
        await self._all(lambda url: self._post(url, "/abort_request", {"abort_all": True}))

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling_params: dict[str, Any] | None = None,
        *,
        rid: str | None = None,
        return_logprob: bool = True,
        url: str | None = None,
    ) -> dict[str, Any]:
        """One generation, on `url` or on the engines in turn; the answer of `/generate`."""
        body: dict[str, Any] = {
            "input_ids": list(input_ids),
            "sampling_params": sampling_params or {},
            "return_logprob": return_logprob,
        }
        if rid is not None:
            body["rid"] = rid
        answer = await self._post(url or next(self._turn), "/generate", body, None)
        if not isinstance(answer, dict):
            raise EngineError(f"/generate answered {type(answer).__name__}, not an object")
        return answer

    async def _expect(self, url: str, version: int) -> None:
        served = await self._version(url)
        if served != version:
            raise EngineError(f"engine {url} serves version {served}, not {version}")

    async def _version(self, url: str) -> int:
        info = await self._get(url, "/model_info")
        version = info.get("weight_version") if isinstance(info, dict) else None
        try:
            return int(str(version))
        except ValueError as error:
            raise EngineError(f"engine {url} serves version {version!r}, no integer") from error

    async def _get(self, url: str, route: str, timeout_s: float | None = None) -> Any:
        timeout = self.timeout_s if timeout_s is None else timeout_s
        return await self._call(url, route, lambda: self._http.get(url + route, timeout=timeout))

    async def _post(
        self, url: str, route: str, body: dict[str, Any], timeout_s: float | None = -1.0
    ) -> Any:
        timeout = self.timeout_s if timeout_s == -1.0 else timeout_s
        send = lambda: self._http.post(url + route, json=body, timeout=timeout)  # noqa: E731
        return await self._call(url, route, send)

    async def _call(
        self, url: str, route: str, send: Callable[[], Awaitable[httpx.Response]]
    ) -> Any:
        if self._http.is_closed:
            raise EngineGone(f"engine {url}{route}: the engine was given up")
        try:
            response = await send()
        except httpx.TransportError as error:
            raise EngineGone(f"engine {url}{route}: {_told(error)}") from error
        if response.status_code != 200:
            raise EngineError(f"engine {url}{route}: {response.status_code} {response.text[:500]}")
        try:
            return response.json()
        except ValueError:
            # SGLang answers some control routes with plain text.
            return response.text

    async def _all(self, action: Callable[[str], Awaitable[Any]]) -> list[Any]:
        """Run `action` on every engine to its end, then raise the first error if any."""
        results = await asyncio.gather(*map(action, self.urls), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results


def _told(error: Exception) -> str:
    """The text of an error, or its kind when it has none."""
    return str(error) or type(error).__name__
