"""An agent server of a run's own: command, restart on the same port."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_core.cluster.local_process import die_with_parent, process
from miles_core.cluster.local_ray import free_ports
from miles_core.errors import UserError
from miles_core.runs.files import write_json

if TYPE_CHECKING:
    from miles_core.config.schema import MilesConfig

START_TIMEOUT_S = 120.0


def agent_python(given: Path | None) -> Path:
    """Python of the agent-server environment: the given one, or `.venv-agent` nearby.

    Raises UserError when there is none.
    """
    here = Path(__file__).resolve().parents[2]
    candidates = [given] if given else [Path.cwd() / ".venv-agent", here / ".venv-agent"]
    for candidate in candidates:
        python = candidate / "bin" / "python" if candidate.is_dir() else candidate
        if os.access(python, os.X_OK):
            return python.absolute()
    raise UserError(
        f"no Python of the agent-server environment at {' or '.join(map(str, candidates))}",
        "Make it with `make setup`, or name one with --agent-python.",
    )


class AgentServer:
    """The process of the agent server; ends with the main thread of the one that starts it."""

    def __init__(self, run: Path, config: MilesConfig, env: dict[str, str], secret: str) -> None:
        self.folder = run / "cluster"
        self._run = run
        self._config = config
        self._env = {**env, "HARBOR_ADMIN_SECRET": secret}
        self.port = next(free_ports(1))
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        return self.folder / "agent_server.log"

    @property
    def ready_file(self) -> Path:
        return self.folder / "agent_server_ready.json"

    def command(self) -> list[str]:
        part = self._config.agent_server
        command = [str(agent_python(part.agent_python)), "-m", "miles_core.agent_server.main"]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--ready-file", str(self.ready_file), "--parent-pid", str(os.getpid())]
        command += ["--max-concurrent", str(part.max_concurrent)]
        command += ["--agent-timeout", str(part.agent_timeout), "--sandbox", part.sandbox]
        command += ["--trials-dir", str(self._run / "agent_server")]
        command += ["--tasks-dir", str(part.tasks_dir)]
        if part.agent_config:
            command += ["--agent-config", str(part.agent_config)]
        return command

    def start(self) -> None:
        """Start it, or start it again; it is ready once its ready file is there."""
        self.ready_file.unlink(missing_ok=True)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._env,
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )
        started = process(self.process.pid)
        info: dict[str, Any] = {
            "pid": self.process.pid,
            "started": started.started if started else 0,
            "url": self.url,
            "since": time.time(),
        }
        write_json(self.folder / "agent_server.json", info)
