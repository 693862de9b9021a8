"""The session servers of an attempt: on consecutive ports, and started anew when one dies.

A server keeps each turn on disk, so that its successor on the same port and folder still gives
the samples of trials that have ended; those that were running get an error of their own kind.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from miles_core.cluster.services import Service, ServiceError
from miles_core.config.schema import MilesConfig

log = logging.getLogger("miles.attempt")

MOST_RESTARTS = 5
RESTARTS_WITHIN_S = 600.0
# A session lives longer than the longest trial, whose agent may be silent throughout.
SESSION_MARGIN_S = 600.0


class SessionServers:
    """Starts, watches and ends them. `on_restart` is told of each server that had to be."""

    def __init__(
        self,
        config: MilesConfig,
        directory: Path,
        hf_checkpoint: str,
        token: str,
        on_restart: Callable[[str], None],
    ) -> None:
        self._config = config
        self._directory = directory
        self._hf_checkpoint = hf_checkpoint
        self._token = token
        self._on_restart = on_restart
        self._services: list[Service] = []
        self._reviving: list[Service] = []
        self._restarts: list[float] = []
        self._engines: dict[str, Any] = {"urls": [], "weight_version": 0}
        self._told: dict[str, dict[str, Any]] = {}
        self._telling = asyncio.Lock()
        self.instances: list[str] = []

    def start(self) -> None:
        """Start all servers; their calls wait until `route` names engines."""
        count = self._config.sessions.session_server_workers
        self._services = [self._service(index) for index in range(count)]
        for service in self._services:
            service.start()

    async def route(self, engine_urls: list[str], weight_version: int) -> None:
        """Let sessions ask these engines alone, which serve that version; a dead server is told
        when it is back."""
        self._engines = {"urls": list(engine_urls), "weight_version": weight_version}
        self._told.clear()
        await self._tell()

    async def _tell(self) -> None:
        """Tell the servers that live and do not know yet."""
        async with self._telling:
            for service in self._services:
                engines = self._engines
                if self._told.get(service.name) == engines or not service.ready_file.exists():
                    continue
                url = json.loads(service.ready_file.read_text())["url"]
                headers = {"Authorization": f"Bearer {self._token}"}
                try:
                    async with httpx.AsyncClient(timeout=30, trust_env=False) as client:
                        answer = await client.put(f"{url}/engines", json=engines, headers=headers)
                        answer.raise_for_status()
                except httpx.TransportError as error:
                    log.warning("%s is not told of the engines now: %s", service.name, error)
                    continue
                self._told[service.name] = engines

    def _service(self, index: int) -> Service:
        sessions = self._config.sessions
        port = 0 if sessions.session_server_port is None else sessions.session_server_port + index
        timeout_s = self._config.agent_server.agent_trial_timeout + SESSION_MARGIN_S
        argv = ["miles_core.sessions.server", "--host", sessions.miles_host_ip]
        argv += ["--port", str(port), "--tokenizer", self._hf_checkpoint]
        argv += ["--chat-family", sessions.chat_family]
        argv += ["--spill-dir", str(self._directory / f"sessions-{index}")]
        argv += ["--session-timeout", f"{timeout_s:g}"]
        env = {
            "MILES_SESSION_TOKEN": self._token,
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        return Service(f"session-server-{index}", argv, self._directory, env)

    async def wait(self, timeout_s: float) -> list[str]:
        """URLs of the servers, once they serve."""
        urls = [await service.wait_ready(timeout_s) for service in self._services]
        for service, url in zip(self._services, urls, strict=True):
            # A successor takes the same port, whoever chose it.
            service.argv[service.argv.index("--port") + 1] = url.rpartition(":")[2]
            await self._note_instance(url)
        return urls

    async def _note_instance(self, url: str) -> None:
        async with httpx.AsyncClient(timeout=30, trust_env=False) as client:
            health = (await client.get(f"{url}/health")).raise_for_status().json()
        self.instances.append(health["session_server_instance_id"])

    async def check(self) -> None:
        """Start a dead server anew. Raises as `Service.check`, too, when that helps no more."""
        for service in self._services:
            if service.ended_with() is not None:
                self._revive(service)
        for service in list(self._reviving):
            if service.ready_file.exists():
                self._reviving.remove(service)
                await self._note_instance(json.loads(service.ready_file.read_text())["url"])
        await self._tell()

    def _revive(self, service: Service) -> None:
        now = time.monotonic()
        self._restarts = [t for t in self._restarts if now - t < RESTARTS_WITHIN_S]
        try:
            service.check()
        except ServiceError as error:
            if len(self._restarts) >= MOST_RESTARTS:
                raise
            self._restarts.append(now)
            log.warning("%s; it is started anew", error)
            self._on_restart(f"{error}; it was started anew")
            if service in self._reviving:
                self._reviving.remove(service)
            self._told.pop(service.name, None)
            service.start()
            self._reviving.append(service)

    def stop(self) -> None:
        """End every server."""
        for service in self._services:
            service.stop()
        self._services, self._reviving = [], []
