"""The client of Ray's REST API against a loopback server that answers as Ray does."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from miles_core.cluster.jobs import (
    RUN_KEY,
    ClusterRefused,
    ClusterUnreachable,
    RayJobs,
    attach_or_submit,
    job_id,
    read_token,
)
from miles_core.config.schema import MilesConfig
from miles_core.runs.directory import RunDir


class FakeRay(ThreadingHTTPServer):
    """Jobs in a dictionary; `fail` makes the next answers errors."""

    jobs: dict[str, dict[str, Any]]
    bodies: list[dict[str, Any]]
    fail: tuple[int, str] | None = None


class Handler(BaseHTTPRequestHandler):
    server: FakeRay

    def _answer(self, status: int, content: Any) -> None:
        body = content if isinstance(content, str) else json.dumps(content)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body.encode())

    def _refused(self) -> bool:
        if self.headers.get("Authorization") != "Bearer right":
            self._answer(401, "Unauthorized")
            return True
        if self.server.fail:
            self._answer(*self.server.fail)
            return True
        return False

    def do_GET(self) -> None:
        if self._refused():
            return
        name = self.path.removeprefix("/api/jobs/")
        if not name:
            self._answer(200, list(self.server.jobs.values()))
        elif name in self.server.jobs:
            self._answer(200, self.server.jobs[name])
        else:
            self._answer(404, "not found")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self._refused():
            return
        self.server.bodies.append(body)
        name = body["submission_id"]
        if name in self.server.jobs:
            self._answer(500, f"ValueError: Job with submission_id {name} already exists.")
            return
        self.server.jobs[name] = {**body, "status": "PENDING", "start_time": len(self.server.jobs)}
        self._answer(200, {"submission_id": name})

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def ray() -> Iterator[FakeRay]:
    server = FakeRay(("127.0.0.1", 0), Handler)
    server.jobs, server.bodies = {}, []
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def run(tmp_path: Path, small_config: MilesConfig) -> RunDir:
    return RunDir.create(tmp_path / "a run", small_config, {})


def client(ray: FakeRay, token: str = "right") -> RayJobs:
    return RayJobs(f"http://127.0.0.1:{ray.server_port}", token)


def test_submit_quotes_and_carries_identity_but_no_environment(ray: FakeRay, run: RunDir) -> None:
    with client(ray) as jobs:
        job, attempt = attach_or_submit(jobs, run)
    (body,) = ray.bodies
    assert attempt == 1 and job.id == job_id(run, 1)
    assert (
        f"'{run.path}'" in body["entrypoint"] and "miles_core.cluster.driver" in body["entrypoint"]
    )
    assert body["metadata"][RUN_KEY] == run.identity()["id"]
    assert body["entrypoint_num_cpus"] == 0
    assert "runtime_env" not in body


def test_a_live_job_is_attached_to_and_an_ended_one_is_followed_by_the_next(
    ray: FakeRay, run: RunDir
) -> None:
    with client(ray) as jobs:
        first, _ = attach_or_submit(jobs, run)
        ray.jobs[first.id]["status"] = "RUNNING"
        again, attempt = attach_or_submit(jobs, run)
        assert (again.id, attempt) == (first.id, 1)
        ray.jobs[first.id]["status"] = "FAILED"
        second, attempt = attach_or_submit(jobs, run)
    assert attempt == 2 and second.id != first.id and len(ray.bodies) == 2


def test_another_runs_job_is_not_attached_to(ray: FakeRay, run: RunDir) -> None:
    ray.jobs["other"] = {
        "submission_id": "other",
        "status": "RUNNING",
        "metadata": {RUN_KEY: "another", "attempt": "1"},
    }
    with client(ray) as jobs:
        job, _ = attach_or_submit(jobs, run)
    assert job.id != "other"


def test_a_taken_id_is_attached_to(ray: FakeRay, run: RunDir) -> None:
    taken = job_id(run, 1)
    ray.jobs[taken] = {"submission_id": taken, "status": "PENDING", "metadata": {}}
    with client(ray) as jobs:
        job, _ = attach_or_submit(jobs, run)
    assert job.id == taken and len(ray.bodies) == 1


def test_errors_are_told_apart(ray: FakeRay, run: RunDir) -> None:
    with client(ray, token="wrong") as jobs, pytest.raises(ClusterRefused, match="token"):
        jobs.jobs("x")
    ray.fail = (503, "starting")
    with client(ray) as jobs:
        with pytest.raises(ClusterUnreachable):
            jobs.jobs("x")
        assert not jobs.ready()
    ray.fail = (500, "broken")
    with client(ray) as jobs, pytest.raises(ClusterRefused, match="broken"):
        attach_or_submit(jobs, run)
    with RayJobs("http://127.0.0.1:9") as jobs, pytest.raises(ClusterUnreachable):
        jobs.jobs("x")


def test_messages_leave_the_log_out(ray: FakeRay) -> None:
    ray.jobs["j"] = {
        "submission_id": "j",
        "status": "FAILED",
        "message": "Job failed with exit code 7, last available logs (...):\n" + "x" * 20000,
    }
    with client(ray) as jobs:
        job = jobs.get("j")
    assert job is not None and job.message == "Job failed with exit code 7" and not job.live


def test_the_token_is_found_as_ray_finds_it(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    assert read_token(None) is None
    (tmp_path / "token").write_text("abc\n")
    assert read_token(tmp_path / "token") == "abc"
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    assert read_token(None) == "abc"
