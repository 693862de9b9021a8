"""Client of the session servers' control routes."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import httpx

from miles_core.sessions.protocol import SessionCreated, SessionHandle, SessionSamples


class SessionClient:
    """Opens sessions on one of several servers in turn, reads their samples, drops them.

    `external_host` replaces the host of the URL that an agent gets, for sandboxes that reach the
    servers under another name. Every method raises `httpx.HTTPError` when the server does not
    answer or refuses.
    """

    def __init__(
        self,
        urls: list[str],
        token: str | None = None,
        external_host: str | None = None,
        timeout_s: float = 120.0,
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

    async def create(
        self,
        max_seq_len: int,
        max_turns: int | None = None,
        sampling_params: dict[str, Any] | None = None,
        name: str | None = None,
    ) -> SessionHandle:
        """Open a session on the next server that can be reached."""
        body = {
            "session_id": name,
            "max_seq_len": max_seq_len,
            "max_turns": max_turns,
            "sampling_params": sampling_params or {},
        }
        for attempt in range(1, self._count + 1):
            url = next(self._urls)
            try:
                response = await self._http.post(f"{url}/sessions", json=body)
            except httpx.ConnectError:
                if attempt == self._count:
                    raise
                continue
            response.raise_for_status()
            created = SessionCreated.model_validate_json(response.content)
            return SessionHandle(
                base_url=f"{self._advertised(url)}{created.path}/v1",
                server_url=url,
                session_id=created.session_id,
                instance_id=created.session_server_instance_id,
            )
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
        response = await self._http.get(f"{self._url(handle)}/samples")
        response.raise_for_status()
        # Long sessions are megabytes of numbers: keep the loop free while they are checked.
        return await asyncio.to_thread(SessionSamples.model_validate_json, response.content)

    async def delete(self, handle: SessionHandle) -> None:
        """Drop the session and abort what runs in it; one that is gone already is no error."""
        response = await self._http.delete(self._url(handle))
        if response.status_code != 404:
            response.raise_for_status()

    @staticmethod
    def _url(handle: SessionHandle) -> str:
        return f"{handle.server_url}/sessions/{handle.session_id}"

    async def aclose(self) -> None:
        await self._http.aclose()
