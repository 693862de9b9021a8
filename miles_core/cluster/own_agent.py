"""An agent server for the time of one command, outside of any run."""

from __future__ import annotations

import os
import secrets
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from miles_core.cluster import local_process as procs
from miles_core.cluster.local_agent import START_TIMEOUT_S, agent_python
from miles_core.errors import UserError
from miles_core.runs.files import read_json
from miles_core.serving import EXIT_USAGE

STOP_GRACE_S = 60.0
_POLL_S = 0.05
_SHOWN_LINES = 5


@dataclass(frozen=True)
class OwnAgentServer:
    """How to start one; `trials_dir` None: what its trials leave is deleted in the end."""

    tasks_dir: Path
    max_concurrent: int
    sandbox: str = "bubblewrap"
    agent_timeout: float = 1800.0
    trials_dir: Path | None = None
    python: Path | None = None
    images: str = "host"
    images_cache_gb: float | None = None

    @contextmanager
    def serve(self) -> Iterator[tuple[str, str]]:
        """The URL and the token of the server, which is ended with the block.

        Must be entered from the main thread. Raises UserError, with its last words, when it does
        not start.
        """
        token = secrets.token_urlsafe(32)
        with tempfile.TemporaryDirectory(prefix="miles-agent-") as name:
            folder = Path(name)
            log, ready = folder / "log", folder / "ready.json"
            with log.open("wb") as output:
                process = subprocess.Popen(
                    self._command(folder, ready),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env={**os.environ, "HARBOR_ADMIN_SECRET": token},
                    start_new_session=True,
                    preexec_fn=procs.die_with_parent(),
                )
            try:
                _wait_ready(process, ready, log)
                yield str(read_json(ready)["url"]), token
            finally:
                _end(process)

    def _command(self, folder: Path, ready: Path) -> list[str]:
        command = [str(agent_python(self.python)), "-m", "miles_core.agent_server.main"]
        command += ["--host", "127.0.0.1", "--port", "0", "--ready-file", str(ready)]
        command += ["--parent-pid", str(os.getpid()), "--sandbox", self.sandbox]
        command += ["--max-concurrent", str(self.max_concurrent)]
        command += ["--agent-timeout", f"{self.agent_timeout:g}"]
        command += ["--trials-dir", str((self.trials_dir or folder / "trials").absolute())]
        command += ["--images", self.images]
        if self.images_cache_gb is not None:
            command += ["--images-cache-gb", f"{self.images_cache_gb:g}"]
        return [*command, "--tasks-dir", str(self.tasks_dir.absolute())]


def _wait_ready(process: subprocess.Popen[bytes], ready: Path, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not ready.exists():
        code = process.poll()
        if code is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            continue
        how = f"did not start in {START_TIMEOUT_S:g} s" if code is None else f"ended with {code}"
        if code == EXIT_USAGE:
            how = "cannot start"
        lines = log.read_text(errors="replace").splitlines()[-_SHOWN_LINES:]
        raise UserError(f"the agent server {how}", "\n  ".join(lines) or "It said nothing.")


def _end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM ends its trials and their sandboxes; what is left after a while is killed."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            procs.end(procs.descendants(process.pid), grace_s=0.0)
            process.kill()
            process.wait()
