"""The supervisor's view of the local cluster: start or adopt it, wait for it, end it."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_core.cluster import local_process as procs
from miles_core.cluster.jobs import RayJobs, read_token
from miles_core.cluster.local import CLUSTER_ID, cluster_dir, needs_agent_server, needs_ray
from miles_core.cluster.local_agent import START_TIMEOUT_S as AGENT_TIMEOUT_S
from miles_core.cluster.local_ray import START_TIMEOUT_S as RAY_TIMEOUT_S
from miles_core.cluster.local_secrets import ensure_secrets
from miles_core.errors import UserError
from miles_core.runs.directory import RunDir

if TYPE_CHECKING:
    from miles_core.config.schema import MilesConfig

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 60.0
_children: list[subprocess.Popen[bytes]] = []  # guardians that this process started


class ClusterNotReady(ConnectionError):
    """The local cluster did not come up in time, or broke while it was waited for."""


@dataclass(frozen=True)
class Cluster:
    """Where a run's Ray and agent server are; tokens are in files."""

    ray_url: str
    ray_token_path: Path | None
    agent_server_url: str

    def jobs(self) -> RayJobs:
        """A client of its Ray jobs."""
        return RayJobs(self.ray_url, read_token(self.ray_token_path))


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content: dict[str, Any] = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    return content


def _recorded(folder: Path, name: str) -> procs.Process | None:
    info = _read(folder / f"{name}.json")
    return None if info is None else procs.Process(info["pid"], info["started"])


def guardian(run: RunDir) -> procs.Process | None:
    """The live guardian of a run."""
    found = _recorded(cluster_dir(run), "guardian")
    return found if found is not None and found.alive else None


def start(run: RunDir, config: MilesConfig) -> None:
    """Adopt the run's live guardian or start a new one; does not wait until it is ready.

    What a killed guardian may have left behind is ended first. Raises UserError when the
    agent-server environment is missing.
    """
    folder = cluster_dir(run)
    folder.mkdir(exist_ok=True)
    ensure_secrets(run, needs_agent_server(config))
    if not needs_ray(config) and not needs_agent_server(config):
        return
    if needs_agent_server(config):
        from miles_core.cluster.local_agent import agent_python

        agent_python(config.agent_server.agent_python)
    with (folder / "start.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        alive = guardian(run)
        if alive is not None and (folder / "stop").exists():
            procs.wait_gone([alive], STOP_TIMEOUT_S)
            alive = guardian(run)
        if alive is not None:
            return
        _clear(run)
        with (folder / "guardian.log").open("ab") as output:
            child = subprocess.Popen(
                [sys.executable, "-m", "miles_core.cluster.local", str(run.path)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        _children.append(child)
        while guardian(run) is None:
            if child.poll() is not None:
                raise ClusterNotReady(f"the guardian ended at once; see {folder}/guardian.log")
            time.sleep(0.05)


def _clear(run: RunDir) -> None:
    """End what a guardian that is gone left behind: what bears its mark, and what it recorded."""
    folder = cluster_dir(run)
    info = _read(folder / "guardian.json")
    if info is not None:
        recorded = (_recorded(folder, name) for name in ("ray", "agent_server"))
        left = {p for p in recorded if p is not None and p.alive}
        for root in list(left):
            left.update(procs.descendants(root.pid))
        left.update(procs.marked(CLUSTER_ID, info["cluster_id"]))
        if left:
            log.warning("ending %d processes that a killed guardian left", len(left))
            procs.end(left, grace_s=5.0)
    for name in ("guardian.json", "ray.json", "agent_server.json", "stop"):
        (folder / name).unlink(missing_ok=True)


def locate(run: RunDir, config: MilesConfig) -> Cluster | None:
    """Where the cluster is, ready or not; None while its own part is not started."""
    folder = cluster_dir(run)
    ray = _read(folder / "ray.json") if needs_ray(config) else {"url": config.cluster.ray_address}
    agent_url = config.agent_server.agent_server_url
    agent = (
        _read(folder / "agent_server.json") if needs_agent_server(config) else {"url": agent_url}
    )
    if ray is None or agent is None:
        return None
    token = ray.get("token_path")
    return Cluster(str(ray["url"]), Path(token) if token else None, str(agent["url"]))


def _missing(run: RunDir, config: MilesConfig, parts: tuple[str, ...]) -> str:
    """What is not ready yet, or nothing."""
    folder = cluster_dir(run)
    cluster = locate(run, config)
    if cluster is None:
        return "the guardian"
    if "agent_server" in parts and needs_agent_server(config):
        ready = _read(folder / "agent_server_ready.json")
        server = _recorded(folder, "agent_server")
        if ready is None or server is None or not server.alive:
            return "the agent server"
    if "ray" in parts:
        with cluster.jobs() as jobs:
            if not jobs.ready():
                return "Ray"
    return ""


def wait_ready(
    run: RunDir,
    config: MilesConfig,
    parts: tuple[str, ...] = ("agent_server", "ray"),
    interrupted: Callable[[], None] = lambda: None,
) -> Cluster:
    """Wait until the named parts serve; starts the guardian again when it is gone.

    `interrupted` is called while waiting and may raise. Raises ClusterNotReady with the log to
    read.
    """
    deadline = time.monotonic() + max(RAY_TIMEOUT_S, AGENT_TIMEOUT_S)
    own = needs_ray(config) or needs_agent_server(config)
    while True:
        interrupted()
        if own and guardian(run) is None:
            start(run, config)
        missing = _missing(run, config, parts)
        if not missing:
            cluster = locate(run, config)
            if cluster is not None:
                return cluster
        if missing == "Ray" and not needs_ray(config):
            raise UserError(
                f"no Ray dashboard answers at {config.cluster.ray_address}",
                "Start that cluster, correct --ray-address, or leave it out.",
            )
        if time.monotonic() > deadline:
            logs = cluster_dir(run)
            raise ClusterNotReady(f"{missing} was not ready in time; see the logs in {logs}")
        time.sleep(0.2)


def stop(run: RunDir, timeout_s: float = STOP_TIMEOUT_S) -> bool:
    """Ask the guardian to end and wait; True when nothing of the cluster is left."""
    alive = guardian(run)
    folder = cluster_dir(run)
    if alive is not None:
        (folder / "stop").touch()
        if not procs.wait_gone([alive], timeout_s):
            return False
    if folder.is_dir():
        _clear(run)
    for child in list(_children):
        if child.poll() is not None:
            _children.remove(child)
    return True


def own_pid(run: RunDir, name: str) -> int | None:
    """Process id of `guardian`, `ray` or `agent_server`, when it lives."""
    found = _recorded(cluster_dir(run), name)
    return found.pid if found is not None and found.alive and found.pid != os.getpid() else None
