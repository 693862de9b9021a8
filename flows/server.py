"""A temporary Prefect server for runs without one; it dies with the process that starts it."""

from __future__ import annotations

import atexit
import fcntl
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import httpx

from miles_core.cluster.local_process import die_with_parent
from miles_core.cluster.local_ray import free_ports
from miles_core.errors import UserError

START_TIMEOUT_S = 180.0
_STOP_S = 5.0


def configured() -> bool:
    """Whether the environment or the active Prefect profile names a server."""
    if os.environ.get("PREFECT_API_URL"):
        return True
    home = Path(os.environ.get("PREFECT_HOME", "~/.prefect")).expanduser()
    if not (home / "profiles.toml").is_file() and not Path("prefect.toml").is_file():
        return False
    from prefect.settings import PREFECT_API_URL

    return PREFECT_API_URL.value() is not None


class TemporaryServer:
    """The server process; its database stays in `home` for a later look."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.port = next(free_ports(1))
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        return self.home / "server.log"

    def environment(self) -> dict[str, str]:
        """What server and flow share."""
        return {
            "PREFECT_HOME": str(self.home),
            "PREFECT_API_URL": f"http://127.0.0.1:{self.port}/api",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        }

    def start(self) -> None:
        """Start the process; does not wait. Must be called from the main thread."""
        self.home.mkdir(parents=True, exist_ok=True)
        package = importlib.util.find_spec("prefect")
        if package is None or package.origin is None:
            raise UserError("Prefect is not installed in this environment", "Run `make setup`.")
        own = {
            "PREFECT_UI_ENABLED": "0",
            "PREFECT__SERVER_EPHEMERAL": "1",
            "PREFECT__SERVER_FINAL": "1",
            "PREFECT_LOGGING_SERVER_LEVEL": "ERROR",
        }
        command = [sys.executable, "-m", "uvicorn", "--factory", "--log-level", "error"]
        command += ["--app-dir", str(Path(package.origin).parent.parent), "--lifespan", "on"]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        command += ["prefect.server.api.server:create_app"]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.environment(), **own},
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )

    def wait_ready(self) -> None:
        """Wait until it answers. Raises UserError with its log."""
        deadline = time.monotonic() + START_TIMEOUT_S
        assert self._process is not None
        with httpx.Client(trust_env=False, timeout=5.0) as http:
            while time.monotonic() < deadline and self._process.poll() is None:
                try:
                    url = f"http://127.0.0.1:{self.port}/api/health"
                    if http.get(url).status_code == 200:
                        return
                except httpx.TransportError:
                    pass
                time.sleep(0.1)
        raise UserError(
            "the temporary Prefect server did not start",
            f"See {self.log}, or start one with `prefect server start` and set PREFECT_API_URL.",
        )

    def stop(self) -> None:
        """End the process."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextmanager
def _database(home: Path) -> Iterator[None]:
    """Until a server of this Prefect has made the tables in `home`, servers start one by one.

    Tables that a killed server left half made are made anew: no other server can complete them.
    """
    made = home / f"tables-{version('prefect')}"
    if made.exists():
        yield
        return
    home.mkdir(parents=True, exist_ok=True)
    with open(home / "tables.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not any(home.glob("tables-*")):
            for part in home.glob("prefect.db*"):
                part.unlink()
        yield
        made.touch()


@contextmanager
def prefect_server(home: Path) -> Iterator[None]:
    """A Prefect server for the block: the configured one, or a temporary one that keeps its
    database in `home`. Must be entered before prefect is imported."""
    if configured():
        yield
        return
    server = TemporaryServer(home)
    with _database(home):
        server.start()
        # Prefect sends its last logs and events when the interpreter exits. Handlers run in
        # reverse order, so this one, from before its import, ends the server after them.
        atexit.register(server.stop)
        os.environ.update(server.environment())
        import flows.train  # noqa: F401  (imports while the server starts)

        server.wait_ready()
    yield
