"""Client of the session servers' control routes."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import httpx

from miles_core.sessions.protocol import SessionCreated, SessionHandle, SessionSamples

_BROKEN = (httpx.ConnectError, httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError)


class SessionClient:
    """Opens sessions on one of several servers in turn, reads their samples, drops them.

    `external_host` replaces the host of the URL that an agent gets, for sandboxes that reach the
    servers under another name. A server that cannot be reached is tried again for `patience_s`.
    Every method raises `httpx.HTTPError` when the server does not answer or refuses.
    """

    def __init__(
        self,
        urls: list[str],
        token: str | None = None,
        external_host: str | None = None,
        timeout_s: float = 120.0,
        patience_s: float = 60.0,
    ) -> None:
        if not urls:
            raise ValueError("SessionClient needs the URL of at least one session server")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._http = httpx.AsyncClient(
            headers=headers, timeout=httpx.Timeout(timeout_s, connect=10.0), trust_env=False
        )
        self._urls = itertools.cycle([url.rstrip("/") for url in urls])
        self._count = len(urls)
        self._external_host = external_host
        self._patience_s = patience_s

    async def create(
        self,
        max_seq_len: int,
        max_turns: int | None = None,
        sampling_params: dict[str, Any] | None = None,
        name: str | None = None,
        routed_experts: bool = False,
    ) -> SessionHandle:
        """Open a session on the next server that can be reached."""
        body = {
            "session_id": name,
            "max_seq_len": max_seq_len,
            "max_turns": max_turns,
            "sampling_params": sampling_params or {},
            "routed_experts": routed_experts,
        }
        url, response = await self._send("POST", self._urls, "/sessions", json=body)
        created = SessionCreated.model_validate_json(response.raise_for_status().content)
        return SessionHandle(
            base_url=f"{self._advertised(url)}{created.path}/v1",
            server_url=url,
            session_id=created.session_id,
            instance_id=created.session_server_instance_id,
        )

    async def _send(
        self, method: str, urls: Iterator[str], path: str, **content: Any
    ) -> tuple[str, httpx.Response]:
        """Ask the servers in turn until one answers; one that died comes back within seconds."""
        deadline = time.monotonic() + self._patience_s
        for attempt in itertools.count(1):
            url = next(urls)
            try:
                return url, await self._http.request(method, f"{url}{path}", **content)
            except _BROKEN:
                if time.monotonic() > deadline:
                    raise
                if attempt % self._count == 0:
                    await asyncio.sleep(0.2)
        raise AssertionError("unreachable: the loop returns or raises")

    def _advertised(self, url: str) -> str:
        if self._external_host is None:
            return url
        parts = urlsplit(url)
        host = self._external_host
        if ":" in host and not host.startswith("["):
            host = f"[{host}]"
        return urlunsplit(parts._replace(netloc=f"{host}:{parts.port}" if parts.port else host))

    async def samples(self, handle: SessionHandle) -> SessionSamples:
        """Everything that the session recorded, token by token; may be asked again."""
        path = f"/sessions/{handle.session_id}/samples"
        _, response = await self._send("GET", itertools.repeat(handle.server_url), path)
        response.raise_for_status()
        # Long sessions are megabytes of numbers: keep the loop free while they are checked.
        return await asyncio.to_thread(SessionSamples.model_validate_json, response.content)

    async def delete(self, handle: SessionHandle) -> None:
        """Drop the session and abort what runs in it; one that is gone already is no error."""
        response = await self._http.delete(f"{handle.server_url}/sessions/{handle.session_id}")
        if response.status_code != 404:
            response.raise_for_status()

    async def aclose(self) -> None:
        await self._http.aclose()
