"""The Ray jobs of a run, over the dashboard's REST API; ray itself is not imported.

API: https://docs.ray.io/en/latest/cluster/running-applications/job-submission/rest.html
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from miles_core.errors import UserError
from miles_core.runs.directory import RunDir

LIVE = frozenset({"PENDING", "RUNNING"})
ENDED = frozenset({"STOPPED", "SUCCEEDED", "FAILED"})
RUN_KEY = "miles_run_id"
_TIMEOUT_S = 15.0
_MESSAGE_CHARS = 500


class ClusterUnreachable(ConnectionError):
    """Nothing answers at the address of the Ray dashboard."""


class ClusterRefused(UserError):
    """The cluster turns this client away; trying again does not help."""


@dataclass(frozen=True)
class Job:
    """A job as Ray reports it; `status` is one of PENDING, RUNNING, STOPPED, SUCCEEDED, FAILED."""

    id: str
    status: str
    message: str
    metadata: dict[str, str]
    start_time: int

    @property
    def live(self) -> bool:
        return self.status in LIVE


def job_id(run: RunDir, attempt: int) -> str:
    """The id under which an attempt of a run is submitted; names may repeat, run ids do not."""
    identity = run.identity()
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", identity["name"])
    return f"miles-{name}-{identity['id'][:8]}-a{attempt:03d}"


def driver_entrypoint(run: RunDir, attempt: int) -> list[str]:
    """The command of an attempt's driver."""
    return [
        sys.executable,
        "-m",
        "miles_core.cluster.driver",
        str(run.path),
        "--attempt",
        str(attempt),
    ]


def read_token(path: Path | None) -> str | None:
    """The cluster's token: from `path`, else as Ray's own clients find it; None without one."""
    if path is None:
        if token := os.environ.get("RAY_AUTH_TOKEN"):
            return token
        given = os.environ.get("RAY_AUTH_TOKEN_PATH")
        path = Path(given) if given else Path.home() / ".ray" / "auth_token"
        if not path.is_file():
            return None
    return path.read_text().strip()


class RayJobs:
    """Client of one cluster's jobs. Raises ClusterUnreachable and ClusterRefused."""

    def __init__(self, url: str, token: str | None = None) -> None:
        self.url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._http = httpx.Client(
            base_url=self.url, headers=headers, timeout=_TIMEOUT_S, trust_env=False
        )

    def __enter__(self) -> RayJobs:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        try:
            answer = self._http.request(method, path, json=body)
        except httpx.TransportError as error:
            raise ClusterUnreachable(
                f"no answer from the Ray dashboard at {self.url}: {error!r}"
            ) from error
        if answer.status_code in (401, 403):
            raise ClusterRefused(
                f"the Ray cluster at {self.url} refuses this client's token",
                "Set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH to the cluster's token file.",
            )
        return answer

    def _json(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        answer = self._call(method, path, body)
        if answer.status_code in (502, 503, 504):
            raise ClusterUnreachable(
                f"{self.url} answers {answer.status_code}: {answer.text[:200]}"
            )
        if answer.is_error:
            raise ClusterRefused(
                f"{method} {self.url}{path} answers {answer.status_code}: "
                f"{answer.text.strip()[-_MESSAGE_CHARS:]}",
                "Is it the URL of a Ray dashboard with a job server (ray[default])?",
            )
        return answer.json()

    def ready(self) -> bool:
        """Whether the cluster takes jobs: its dashboard answers and its agent is registered."""
        try:
            if self._call("GET", "/api/version").is_error:
                return False
            return self._call("GET", "/api/jobs/").status_code == 200
        except ClusterUnreachable:
            return False

    def jobs(self, run_id: str) -> list[Job]:
        """All jobs of a run that the cluster knows, oldest first."""
        found = [_job(raw) for raw in self._json("GET", "/api/jobs/") if raw.get("submission_id")]
        return sorted(
            (job for job in found if job.metadata.get(RUN_KEY) == run_id),
            key=lambda job: job.start_time,
        )

    def live(self, run_id: str) -> Job | None:
        """The live job of a run."""
        return next((job for job in self.jobs(run_id) if job.live), None)

    def get(self, submission_id: str) -> Job | None:
        """One job, or None when the cluster does not know it."""
        path = f"/api/jobs/{submission_id}"
        answer = self._call("GET", path)
        if answer.status_code == 404:
            return None
        return _job(self._json("GET", path) if answer.is_error else answer.json())

    def submit(
        self, submission_id: str, entrypoint: list[str], metadata: dict[str, str]
    ) -> Job | None:
        """Submit a job that claims no CPU for its driver; None when the id is taken."""
        body = {
            "entrypoint": shlex.join(entrypoint),
            "submission_id": submission_id,
            "metadata": metadata,
            "entrypoint_num_cpus": 0,
        }
        answer = self._call("POST", "/api/jobs/", body)
        if answer.is_success:
            return self.get(submission_id)
        if "already exists" in answer.text:
            return None
        if "agent" in answer.text.lower() and answer.status_code >= 500:
            raise ClusterUnreachable(f"{self.url} cannot take jobs yet: {answer.text[-300:]}")
        raise ClusterRefused(
            f"Ray refuses the job {submission_id}: {answer.text.strip()[-_MESSAGE_CHARS:]}",
            "See the dashboard's log in Ray's temporary folder.",
        )

    def stop(self, submission_id: str, wait_s: float) -> Job | None:
        """Stop a job (SIGTERM, and SIGKILL after the head's wait) and wait until it has ended."""
        job = self.get(submission_id)
        if job is None or not job.live:
            return job
        self._call("POST", f"/api/jobs/{submission_id}/stop", {})
        deadline = time.monotonic() + wait_s
        while job is not None and job.live and time.monotonic() < deadline:
            time.sleep(0.3)
            job = self.get(submission_id)
        return job


def _reason(message: str) -> str:
    """Ray's message without the log that it appends to it."""
    return message.partition(", last available logs")[0].strip()[:_MESSAGE_CHARS]


def _job(raw: dict[str, Any]) -> Job:
    return Job(
        id=raw["submission_id"],
        status=str(raw["status"]),
        message=_reason(raw.get("message") or ""),
        metadata=raw.get("metadata") or {},
        start_time=raw.get("start_time") or 0,
    )


def attach_or_submit(
    jobs: RayJobs,
    run: RunDir,
    entrypoint: Callable[[RunDir, int], list[str]] = driver_entrypoint,
) -> tuple[Job, int]:
    """The run's live job, or a new one for the next attempt; with its attempt number."""
    run_id = run.identity()["id"]
    live = jobs.live(run_id)
    if live is not None:
        return live, int(live.metadata["attempt"])
    attempt = run.new_attempt()
    submission_id = job_id(run, attempt)
    metadata = {RUN_KEY: run_id, "run": str(run.path), "attempt": str(attempt)}
    job = jobs.submit(submission_id, entrypoint(run, attempt), metadata)
    if job is None:  # another supervisor was faster
        job = jobs.get(submission_id)
    if job is None:
        raise ClusterUnreachable(f"{jobs.url} lost the job {submission_id}")
    return job, attempt
