"""An agent server process, for the tests of the agent server; and the task directories for it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from task_directories import CHECK as CHECK
from task_directories import SOLVE as SOLVE
from task_directories import TOML as TOML
from task_directories import make_task as make_task

from miles_core.agent_server.client import AgentServerClient
from miles_core.agent_server.protocol import TrialRequest, TrialResult
from miles_core.verdicts import Cause, VerdictKind

SECRET = "token-of-the-tests"


class Server:
    """One agent server process."""

    def __init__(self, root: Path, tasks: Path, *flags: str) -> None:
        self.root, self.tasks = root, tasks
        self.trials = root / "trials"
        self._flags = flags
        self.process: subprocess.Popen[bytes] | None = None
        self.url = ""
        self.start()

    def start(self, port: int = 0) -> None:
        ready = self.root / f"ready-{uuid.uuid4().hex}.json"
        command = [sys.executable, "-m", "miles_core.agent_server.main", "--port", str(port)]
        command += ["--ready-file", str(ready), "--trials-dir", str(self.trials)]
        command += ["--tasks-dir", str(self.tasks), *self._flags]
        log = open(self.root / "server.log", "ab")  # noqa: SIM115 (the process keeps it)
        env = {**os.environ, "HARBOR_ADMIN_SECRET": SECRET}
        self.process = subprocess.Popen(command, stdout=log, stderr=log, env=env)
        log.close()
        end = time.monotonic() + 120
        while not ready.exists():
            assert self.process.poll() is None, (self.root / "server.log").read_text()
            assert time.monotonic() < end, "the server did not become ready"
            time.sleep(0.05)
        self.url = json.loads(ready.read_text())["url"]

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait; the exit status."""
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(60)

    def call(self, use: Callable[[AgentServerClient], Any], **kwargs: Any) -> Any:
        """Run `await use(client)`."""

        async def main() -> Any:
            async with AgentServerClient(self.url, SECRET, **kwargs) as client:
                return await use(client)

        return asyncio.run(main())

    def run(self, instance_id: str, agent_name: str = "oracle", **fields: Any) -> TrialResult:
        """One trial to its end."""
        request = TrialRequest(instance_id=instance_id, agent_name=agent_name, **fields)
        trial_id = f"t-{uuid.uuid4().hex[:12]}"
        return self.call(lambda client: client.run(trial_id, request, 120.0))


def assert_no_verdict(result: TrialResult, cause: Cause, words: str) -> None:
    """A trial has no verdict, for a cause; its detail has what the pattern `words` says."""
    assert result.verdict.kind is VerdictKind.NO_VERDICT and result.reward is None, result.verdict
    assert result.verdict.cause is cause, result.verdict
    assert re.search(words, result.verdict.detail), result.verdict.detail
