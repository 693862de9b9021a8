"""An agent server process and task directories, for the tests of the agent server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from miles_core.agent_server.client import AgentServerClient
from miles_core.agent_server.protocol import TrialRequest, TrialResult

SECRET = "token-of-the-tests"

TOML = """schema_version = "1.4"
[agent]
timeout_sec = {agent_s}
[verifier]
timeout_sec = {verifier_s}
[environment]
workdir = "/app"
network_mode = "no-network"
memory_mb = 512
storage_mb = 64
"""

CHECK = """#!/bin/bash
if [ "$(cat /app/answer.txt 2>/dev/null)" = "42" ]; then r=1; else r=0; fi
echo $r > /logs/verifier/reward.txt
"""

SOLVE = "#!/bin/bash\necho 42 > /app/answer.txt\n"


def make_task(
    root: Path,
    name: str,
    *,
    test: str = CHECK,
    solve: str | None = SOLVE,
    dockerfile: str = "FROM debian:12-slim\nWORKDIR /app\n",
    toml: str = TOML,
    agent_s: float = 60.0,
    verifier_s: float = 30.0,
) -> Path:
    """A task directory; the default task wants /app/answer.txt to hold 42."""
    task = root / name
    files = {
        "task.toml": toml.replace("{agent_s}", str(agent_s)).replace(
            "{verifier_s}", str(verifier_s)
        ),
        "instruction.md": "Write 42 into /app/answer.txt\n",
        "environment/Dockerfile": dockerfile,
        "tests/test.sh": test,
    }
    if solve is not None:
        files["solution/solve.sh"] = solve
    for path, content in files.items():
        (task / path).parent.mkdir(parents=True, exist_ok=True)
        (task / path).write_text(content)
    return task


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
