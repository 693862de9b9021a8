"""Child processes of the driver that serve HTTP and announce themselves by a ready file."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from miles_core.errors import UserError
from miles_core.serving import EXIT_USAGE

STOP_GRACE_S = 10.0


class ServiceError(RuntimeError):
    """A service did not start, or ended while it was needed."""


@dataclass
class Service:
    """One child process; `argv` follows `python -m`."""

    name: str
    argv: list[str]
    directory: Path
    env: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        return self.directory / f"{self.name}.log"

    @property
    def ready_file(self) -> Path:
        return self.directory / f"{self.name}.json"

    def start(self) -> None:
        """Start the process; it ends by itself when this one does."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self.ready_file.unlink(missing_ok=True)
        command = [sys.executable, "-m", *self.argv]
        command += ["--ready-file", str(self.ready_file), "--parent-pid", str(os.getpid())]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.env},
                start_new_session=True,
            )

    async def wait_ready(self, timeout_s: float) -> str:
        """Wait for the ready file; returns the URL. Raises as `check` does."""
        deadline = time.monotonic() + timeout_s
        while not self.ready_file.exists():
            self.check()
            if time.monotonic() > deadline:
                raise ServiceError(
                    f"{self.name} was not ready after {timeout_s:g} s; {self._last_words()}"
                )
            await asyncio.sleep(0.05)
        return str(json.loads(self.ready_file.read_text())["url"])

    def ended_with(self) -> int | None:
        """The exit status of a process that has ended, else None."""
        return None if self.process is None else self.process.poll()

    def check(self) -> None:
        """Raise when the process has ended: UserError for what a person must change first,
        else ServiceError."""
        if self.process is None:
            raise ServiceError(f"{self.name} was not started")
        code = self.process.poll()
        if code is not None:
            if code == EXIT_USAGE:
                raise UserError(f"{self.name} cannot start", self._last_words())
            ending = f"signal {-code}" if code < 0 else f"exit status {code}"
            raise ServiceError(f"{self.name} ended with {ending}; {self._last_words()}")

    def _last_words(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        tail = " | ".join(line.strip() for line in lines[-3:] if line.strip())
        return f"{self.log}: {tail or 'empty'}"

    def kill(self) -> None:
        """End a process that is of no use any more at once, and wait for it."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def stop(self) -> None:
        """End the process and wait for it."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
