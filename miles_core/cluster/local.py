"""The local cluster of a run: a guardian process with its own Ray head and agent server.

`python -m miles_core.cluster.local RUN` is the guardian. It starts what the configuration does not
name (`cluster.ray_address`, `agent_server.agent_server_url`), starts it again when it dies, and
ends all of it: when asked (`RUN/cluster/stop` or SIGTERM), or when for `LINGER_S` seconds neither
a supervisor nor a live job of the run was there. It outlives a supervisor that is killed; the next
one adopts it.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from miles_core.cluster import local_process as procs
from miles_core.cluster.jobs import ClusterUnreachable, RayJobs, read_token
from miles_core.cluster.local_agent import AgentServer
from miles_core.cluster.local_ray import RayHead
from miles_core.runs.directory import RunDir
from miles_core.runs.files import write_json
from miles_core.runs.lock import holder

if TYPE_CHECKING:
    from miles_core.config.schema import MilesConfig

log = logging.getLogger(__name__)

CLUSTER_ID = "MILES_CLUSTER_ID"
LINGER_S = 60.0
_TICK_S = 0.25
_JOB_CHECK_S = 5.0
_GRACE_S = 10.0
_FAST_DEATH_S = 10.0
_MAX_BACKOFF_S = 15.0
_KEPT_LOG_BYTES = 256 * 1024


def cluster_dir(run: RunDir) -> Path:
    """The folder of a run that describes its local cluster."""
    return run.path / "cluster"


def needs_ray(config: MilesConfig) -> bool:
    """Whether the run starts a Ray head of its own."""
    return config.cluster.ray_address is None


def needs_agent_server(config: MilesConfig) -> bool:
    """Whether the run starts an agent server of its own."""
    return config.agent_server.agent_server_url is None


def child_environment(cluster_id: str) -> dict[str, str]:
    """The guardian's environment for its children: marked, and without another cluster's traces."""
    dropped = ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "HARBOR_ADMIN_SECRET", "MILES_SESSION_TOKEN")
    env = {k: v for k, v in os.environ.items() if k not in dropped and not k.startswith("PREFECT_")}
    return {**env, CLUSTER_ID: cluster_id}


class Guardian:
    """Owner of the local processes of one run."""

    def __init__(self, run: RunDir, linger_s: float = LINGER_S) -> None:
        self.run = run
        self.folder = cluster_dir(run)
        self.linger_s = linger_s
        self.cluster_id = uuid.uuid4().hex
        config = run.load_config()
        env = child_environment(self.cluster_id)
        self.ray = RayHead(run.path, env, config.cluster.stop_wait_s) if needs_ray(config) else None
        self.agent: AgentServer | None = None
        if needs_agent_server(config):
            from miles_core.cluster.local_secrets import read_secrets

            secret = read_secrets(run)["HARBOR_ADMIN_SECRET"]
            self.agent = AgentServer(run.path, config, env, secret)
        self._asked = ""
        self._deaths: dict[str, int] = {}
        self._restart_at: dict[str, float] = {}
        self._last_needed = time.monotonic()
        self._last_job_check = 0.0

    def _ask(self, signum: int, _frame: object) -> None:
        self._asked = signal.Signals(signum).name

    def serve(self) -> None:
        """Run until there is a reason to end; then end everything that was started."""
        procs.become_subreaper()
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, self._ask)
        me = procs.this_process()
        write_json(
            self.folder / "guardian.json",
            {"pid": me.pid, "started": me.started, "cluster_id": self.cluster_id},
        )
        try:
            for service in (self.ray, self.agent):
                if service is not None:
                    service.start()
            while not (reason := self._reason_to_end()):
                self._look_after()
                time.sleep(_TICK_S)
            log.info("ending: %s", reason)
        finally:
            self._end_all()

    def _reason_to_end(self) -> str:
        if self._asked:
            return self._asked
        if (self.folder / "stop").exists():
            return "asked by the stop file"
        if not self.run.exists():
            return "the run directory is gone"
        now = time.monotonic()
        if holder(self.run) is not None:
            self._last_needed = now
        elif now - self._last_job_check > _JOB_CHECK_S:
            self._last_job_check = now
            if self._job_is_live():
                self._last_needed = now
        if now - self._last_needed > self.linger_s:
            return f"no supervisor and no job for {self.linger_s:g} s"
        return ""

    def _job_is_live(self) -> bool:
        config = self.run.load_config()
        url = self.ray.url if self.ray else config.cluster.ray_address
        token = read_token(self.ray.token_path if self.ray else None)
        if url is None:
            return False
        try:
            with RayJobs(url, token) as jobs:
                return jobs.live(self.run.identity()["id"]) is not None
        except ClusterUnreachable:
            return False

    def _look_after(self) -> None:
        children = [s.process for s in (self.ray, self.agent) if s is not None and s.process]
        procs.reap(but=children)
        for name, service in (("ray", self.ray), ("agent_server", self.agent)):
            if service is None or service.process is None or service.process.poll() is None:
                continue
            if name not in self._restart_at:
                self._plan_restart(name, service)
            if time.monotonic() >= self._restart_at[name]:
                del self._restart_at[name]
                if service is self.ray:
                    self._clear_ray()
                service.start()

    def _plan_restart(self, name: str, service: RayHead | AgentServer) -> None:
        """Start a dead service again at once, and more slowly when it keeps dying."""
        import json

        assert service.process is not None
        age = time.time() - json.loads((self.folder / f"{name}.json").read_bytes())["since"]
        self._deaths[name] = self._deaths.get(name, 0) + 1 if age < _FAST_DEATH_S else 0
        delay = min(_MAX_BACKOFF_S, 2.0 ** self._deaths[name] - 1)
        log.warning(
            "%s ended with status %s after %.0f s (see %s); starting it again in %.0f s",
            name,
            service.process.returncode,
            age,
            service.log,
            delay,
        )
        self._restart_at[name] = time.monotonic() + delay

    def _clear_ray(self) -> None:
        """End what a dead head left: all descendants that are not the agent server's."""
        mine = set(procs.descendants(os.getpid()))
        if self.agent is not None and self.agent.process is not None:
            pid = self.agent.process.pid
            keep = set(procs.descendants(pid))
            mine = {p for p in mine - keep if p.pid != pid}
        procs.end(mine, grace_s=3.0)
        self._keep_ray_logs()

    def _keep_ray_logs(self) -> None:
        """Save the ends of the logs of Ray's workers, then remove Ray's temporary folder."""
        if self.ray is None:
            return
        logs = self.ray.temp_dir / "session_latest" / "logs"
        for log_file in [*logs.glob("worker-*"), *logs.glob("*.err")]:
            tail = _tail_bytes(log_file, _KEPT_LOG_BYTES)
            if tail.strip():
                target = self.folder / "ray_logs" / log_file.name
                target.parent.mkdir(exist_ok=True)
                target.write_bytes(tail)
        shutil.rmtree(self.ray.temp_dir, ignore_errors=True)

    def _end_all(self) -> None:
        roots = [s.process for s in (self.agent, self.ray) if s is not None and s.process]
        alive = [p for root in roots if (p := procs.process(root.pid)) is not None]
        for root in alive:
            root.send(signal.SIGTERM)
        procs.wait_gone(alive, _GRACE_S)
        for _ in range(3):  # what was orphaned while the first ones ended
            procs.reap(but=roots)
            left = {*procs.descendants(os.getpid()), *procs.marked(CLUSTER_ID, self.cluster_id)}
            left = {p for p in left if p.pid != os.getpid()}
            if not left:
                break
            procs.end(left, grace_s=3.0)
        self._keep_ray_logs()
        for name in ("stop", "ray.json", "agent_server.json", "agent_server_ready.json"):
            (self.folder / name).unlink(missing_ok=True)
        (self.folder / "guardian.json").unlink(missing_ok=True)


def _tail_bytes(path: Path, count: int) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - count))
        return file.read()


@contextlib.contextmanager
def _sole(folder: Path) -> Iterator[bool]:
    """Whether this guardian is the only one of the run; held while it lives."""
    with (folder / "guardian.lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def main(argv: list[str] | None = None) -> int:
    """Entry of the guardian process."""
    import argparse

    parser = argparse.ArgumentParser(prog="python -m miles_core.cluster.local", description=__doc__)
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument(
        "--linger", type=float, default=LINGER_S, help="seconds to live without supervisor and job"
    )
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    run = RunDir(args.run)
    cluster_dir(run).mkdir(exist_ok=True)
    with _sole(cluster_dir(run)) as alone:
        if not alone:
            log.info("another guardian has the run")
            return 0
        Guardian(run, args.linger).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
