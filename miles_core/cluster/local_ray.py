"""A Ray head of a run's own: ports, token, command, health."""

from __future__ import annotations

import hashlib
import math
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from miles_core.cluster.local_process import die_with_parent, process
from miles_core.runs.files import write_json

# Between Ray's own range of worker ports (10002-19999) and the kernel's ephemeral ports.
PORTS = range(20000, 32000)
NUM_CPUS = 8  # accounting only: the actors of a run claim small fractions
OBJECT_STORE_BYTES = 200 * 1024 * 1024
START_TIMEOUT_S = 180.0


def free_ports(count: int) -> Iterator[int]:
    """`count` different ports of `PORTS` that nobody listens on now."""
    found = 0
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        yield port
        found += 1
        if found == count:
            return
    raise OSError(f"no {count} free ports between {PORTS.start} and {PORTS.stop}")


def temp_dir(run: Path) -> Path:
    """Ray's folder for this run. Short, because Unix socket paths have at most 107 bytes."""
    return Path("/tmp") / f"miles-{hashlib.sha256(str(run).encode()).hexdigest()[:10]}"


def make_token(path: Path) -> None:
    """Write a random token, readable by its owner alone, unless there is one."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return
    with os.fdopen(fd, "w") as file:
        file.write(secrets.token_hex(32))


class RayHead:
    """The process `ray start --head --block` of one run.

    `stop_wait_s`: from SIGTERM to SIGKILL of a job's driver. Must be started from the main thread:
    the head gets SIGTERM, and drains, when that thread ends.
    """

    def __init__(self, run: Path, env: dict[str, str], stop_wait_s: float) -> None:
        self.folder = run / "cluster"
        self.token_path = self.folder / "ray_token"
        self.temp_dir = temp_dir(run)
        self._env = env
        self._stop_wait_s = stop_wait_s
        self.process: subprocess.Popen[bytes] | None = None
        self.url = ""
        self.info: dict[str, Any] = {}

    @property
    def log(self) -> Path:
        return self.folder / "ray.log"

    def environment(self) -> dict[str, str]:
        """What the head and, through it, every job inherits."""
        return {
            **self._env,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.token_path),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_JOB_STOP_WAIT_TIME_S": str(math.ceil(self._stop_wait_s)),
            # Ray's default is 15: a trainer rank would starve beside any other work.
            "RAY_worker_niceness": "0",
            # Idle workers that are started ahead cost seconds of CPU and are never needed.
            "RAY_enable_worker_prestart": "0",
            "RAY_prestart_worker_first_driver": "0",
            "TMPDIR": str(self.temp_dir / "tmp"),  # removed with the rest of Ray's folder
        }

    def start(self) -> None:
        """Start the head; it is ready once `healthy` (see `miles_core.cluster.jobs`) says so."""
        make_token(self.token_path)
        (self.temp_dir / "tmp").mkdir(parents=True, exist_ok=True)
        port, dashboard, agent, client = free_ports(4)
        self.url = f"http://127.0.0.1:{dashboard}"
        command = [str(Path(sys.executable).parent / "ray"), "start", "--head", "--block"]
        command += ["--node-ip-address", "127.0.0.1", "--port", str(port)]
        command += ["--include-dashboard", "true", "--dashboard-host", "127.0.0.1"]
        command += ["--dashboard-port", str(dashboard)]
        command += ["--dashboard-agent-listen-port", str(agent)]
        command += ["--ray-client-server-port", str(client)]
        command += ["--temp-dir", str(self.temp_dir), "--num-cpus", str(NUM_CPUS)]
        command += ["--object-store-memory", str(OBJECT_STORE_BYTES)]
        command += ["--disable-usage-stats", "--include-log-monitor", "false"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment(),
                cwd="/",
                start_new_session=True,
                preexec_fn=die_with_parent(signal.SIGTERM),
            )
        started = process(self.process.pid)
        self.info = {
            "pid": self.process.pid,
            "started": started.started if started else 0,
            "url": self.url,
            "address": f"127.0.0.1:{port}",
            "temp_dir": str(self.temp_dir),
            "token_path": str(self.token_path),
            "since": time.time(),
        }
        write_json(self.folder / "ray.json", self.info)
