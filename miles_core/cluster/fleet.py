"""The services that an attempt starts beside its ranks: session servers and engines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from miles_core.cluster.engine_pool import EnginePool
from miles_core.cluster.services import Service
from miles_core.cluster.session_servers import SessionServers
from miles_core.config.schema import MilesConfig
from miles_core.runs.directory import RunDir
from miles_core.runs.files import write_json

READY_S = 180.0


@dataclass(frozen=True)
class Inputs:
    """What the preparing tasks made for this run, and the tokens of its services."""

    rows: str
    hf_checkpoint: str
    torch_dist: str
    ref_torch_dist: str
    eval_rows: str | None
    agent_server_url: str
    agent_token: str | None
    session_token: str

    @classmethod
    def load(cls, run: RunDir) -> Inputs:
        paths = json.loads((run.path / "inputs.json").read_text())
        secrets = json.loads((run.path / "cluster" / "secrets.json").read_text())
        return cls(
            **{"eval_rows": None, **paths},
            agent_token=secrets.get("HARBOR_ADMIN_SECRET"),
            session_token=secrets["MILES_SESSION_TOKEN"],
        )


class Fleet:
    """Starts, watches and ends the services of one attempt.

    `on_alarm(kind, detail)` is told of each session server that had to be started anew
    (`service_restarted`), and of engines that leave and come back (see EnginePool).
    """

    def __init__(
        self,
        run: RunDir,
        config: MilesConfig,
        inputs: Inputs,
        attempt: int,
        on_alarm: Callable[[str, str], None],
    ):
        self._run = run
        self._config = config
        self._inputs = inputs
        self._directory = run.attempt_dir(attempt) / "services"
        self._attempt = attempt
        self._ending = False
        self._sessions = SessionServers(
            config,
            self._directory,
            inputs.hf_checkpoint,
            inputs.session_token,
            lambda detail: on_alarm("service_restarted", detail),
        )
        urls = config.engine.engine_urls
        own = [] if urls else [self._engine(i) for i in range(config.engine.num_engines)]
        self.engines = EnginePool(own, urls, on_alarm, self._sessions.route)

    def _engine(self, index: int) -> Service:
        engine = self._config.engine
        argv = ["miles_core.engines.server", "--model", self._inputs.hf_checkpoint]
        argv += ["--host", self._config.sessions.miles_host_ip, "--port", "0"]
        # An engine has nothing to serve before the first push, nor after a restart.
        argv += ["--load-format", "dummy"]
        argv += ["--threads", str(engine.engine_threads), "--dtype", engine.engine_dtype]
        argv += ["--max-running-requests", str(engine.max_running_requests)]
        tokens = engine.max_running_requests * self._config.rollout.max_seq_len
        argv += ["--max-total-tokens", str(tokens)]
        argv += ["--seed", str(self._config.run.seed + index + 1000 * self._attempt)]
        if engine.record_generations:
            argv += ["--record-dir", str(self._run.engine_log)]
        threads = {"OMP_NUM_THREADS": str(engine.engine_threads)}
        return Service(f"engine-{index}", argv, self._directory, threads)

    def start(self) -> None:
        """Start all services."""
        self.engines.start()
        self._sessions.start()

    async def wait_sessions(self) -> list[str]:
        """URLs of the session servers, once they serve; notes their instance ids on disk."""
        urls = await self._sessions.wait(READY_S)
        self.record("session-instances", self._sessions.instances)
        return urls

    @property
    def session_instances(self) -> list[str]:
        """Instance ids of all session servers that this attempt has had."""
        return self._sessions.instances

    def record(self, name: str, content: Any) -> None:
        """Note on disk, beside the ready files, what a later attempt or a person needs."""
        write_json(self._directory / f"{name}.json", content)

    def earlier_instances(self) -> list[str]:
        """Instance ids of the session servers of earlier attempts."""
        found: list[str] = []
        for path in sorted(self._run.attempts.glob("*/services/session-instances.json")):
            if path.parent != self._directory:
                found += json.loads(path.read_text())
        return found

    async def watch(self, interval_s: float = 0.5) -> None:
        """Return never; raises ServiceError when a service has ended that cannot be replaced."""
        while True:
            if not self._ending:
                await self._check()
            await asyncio.sleep(interval_s)

    async def _check(self) -> None:
        await self.engines.check()
        known = len(self._sessions.instances)
        await self._sessions.check()
        if len(self._sessions.instances) > known:
            self.record("session-instances", self._sessions.instances)

    def expect_end(self) -> None:
        """From now on let services end, and replace none."""
        self._ending = True

    def stop(self) -> None:
        """End every service."""
        self._sessions.stop()
        self.engines.stop()
