"""The server as a process: queue, cancel, leases, restarts, and what is left behind."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

pytest.importorskip("harbor")
from agent_server_helpers import SECRET, Server, make_task  # noqa: E402

from miles_core.agent_server import main  # noqa: E402
from miles_core.agent_server.client import AgentServerClient  # noqa: E402
from miles_core.agent_server.protocol import TrialRequest  # noqa: E402
from miles_core.errors import UserError  # noqa: E402
from miles_core.serving import EXIT_BUSY  # noqa: E402
from miles_core.verdicts import Cause  # noqa: E402

pytestmark = pytest.mark.agent_env

SLEEPER = "sleep 987"
CGROUPS = Path("/sys/fs/cgroup")


def make_server(root: Path) -> Server:
    make_task(root / "tasks", "answer")
    solve = f"#!/bin/bash\n(setsid {SLEEPER} &) ; {SLEEPER}\n"
    make_task(root / "tasks", "long", solve=solve, agent_s=200)
    return Server(root, root / "tasks", "--max-concurrent", "2")


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Server]:
    """A server for one test that stops or kills it."""
    made = make_server(tmp_path)
    yield made
    if made.process is not None and made.process.poll() is None:
        made.stop()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with two slots that goes on living."""
    made = make_server(tmp_path_factory.mktemp("pair"))
    yield made
    made.stop()


def request(task: str = "long", **fields) -> TrialRequest:
    return TrialRequest(instance_id=task, agent_name="oracle", **fields)


def sleepers(server: Server) -> list[int]:
    """Processes of a sandbox of this machine that run the long solution."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if (entry / "cmdline").read_bytes() == b"sleep\x00987\x00":
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def cgroups_of(pid: int) -> list[Path]:
    return list(CGROUPS.glob(f"**/miles-agent-{pid}-*"))


def until(condition, seconds: float = 30.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.1)
    return False


def start_long(server: Server, trial_id: str, **fields) -> None:
    server.call(lambda client: client.start(trial_id, request(**fields)))
    assert until(lambda: len(sleepers(server)) >= 2), "the solution did not start"


def test_cancel_frees_the_sandbox(pair: Server) -> None:
    start_long(pair, "c1")
    status = pair.call(lambda client: client.cancel("c1"))
    assert status.state == "ended" and status.result.verdict.cause is Cause.CANCELLED
    assert until(lambda: not sleepers(pair), 5)
    assert all(not list(directory.glob("c1*")) for directory in cgroups_of(pair.pid))
    assert pair.run("answer").reward == 1.0


def test_lease_that_is_not_renewed_ends_the_trial(pair: Server) -> None:
    pair.call(lambda client: client.start("l1", request(lease_s=1)))
    # Asking for it would renew the lease.
    assert until((pair.trials / "l1" / "result.json").exists)
    status = pair.call(lambda client: client.wait("l1", 20))
    assert status.result.verdict.cause is Cause.LEASE_EXPIRED
    assert until(lambda: not sleepers(pair), 5)


def test_flush_ends_the_trials_of_one_trainer(pair: Server) -> None:
    start_long(pair, "f1", session_server_instance_id="mine")

    async def flush(client: AgentServerClient) -> tuple[list[str], str]:
        await client.start("f2", request(session_server_instance_id="other"))
        ended = await client.flush("mine")
        state = (await client.wait("f2", 0)).state
        await client.cancel("f2")
        return ended, state

    ended, state = pair.call(flush)
    assert ended == ["f1"] and state in ("running", "queued")


def test_queue_and_idempotence(pair: Server) -> None:
    async def use(client: AgentServerClient) -> None:
        for name in ("q1", "q2", "q3", "q4"):
            await client.start(name, request())
        await asyncio.sleep(0.5)
        third, fourth = await client.wait("q3", 0), await client.wait("q4", 0)
        assert (third.state, third.queue_position) == ("queued", 0)
        assert (fourth.state, fourth.queue_position) == ("queued", 1)
        health = await client.health()
        assert (health.running, health.queued, health.capacity) == (2, 2, 2)
        again = await client.start("q3", request(lease_s=77))
        assert again.state == "queued"
        for name in ("q4", "q3", "q2", "q1"):
            assert (await client.cancel(name)).result.verdict.cause is Cause.CANCELLED
        done = await client.run("q5", request("answer"), 60)
        joined = await client.start("q5", request("answer", deadline_s=1))
        assert joined.result == done and done.reward == 1.0

    pair.call(use)


def test_sigkill_keeps_results_ends_what_ran_and_leaves_nothing(own: Server) -> None:
    kept = own.call(lambda client: client.run("kept", request("answer"), 60))
    start_long(own, "lost")
    pid = own.pid
    mounts = Path("/proc/mounts").read_text()
    own.stop(signal.SIGKILL)
    assert until(lambda: not sleepers(own), 10), "processes of the sandbox live on"
    assert Path("/proc/mounts").read_text() == mounts
    own.start()
    assert not cgroups_of(pid), "the cgroups of the killed server were not swept"
    assert own.call(lambda client: client.wait("kept", 0)).result == kept
    lost = own.call(lambda client: client.wait("lost", 0))
    assert lost.state == "ended" and lost.result.verdict.cause is Cause.SERVER_RESTARTED
    assert lost.result.reward is None


def test_sigterm_ends_trials_and_leaves_nothing(own: Server) -> None:
    start_long(own, "s1")
    pid = own.pid
    assert own.stop() == 0
    assert not sleepers(own) and not cgroups_of(pid)
    assert b"server_restarted" in (own.trials / "s1" / "result.json").read_bytes()


def test_client_rides_over_a_restart(own: Server) -> None:
    """A running trial is lost and says so; a lost trials directory means a new start."""

    async def use(client: AgentServerClient):
        running = asyncio.create_task(client.run("r1", request(), 120))
        assert await asyncio.to_thread(until, lambda: len(sleepers(own)) >= 2)
        port = own.port
        await asyncio.to_thread(own.stop, signal.SIGKILL)
        await asyncio.sleep(0.5)
        await asyncio.to_thread(own.start, port)
        return await running

    assert own.call(use).verdict.cause is Cause.SERVER_RESTARTED


def test_parent_that_is_gone_ends_the_server(tmp_path: Path) -> None:
    make_task(tmp_path / "tasks", "answer")
    parent = subprocess.Popen(["sleep", "600"])
    server = Server(tmp_path, tmp_path / "tasks", "--parent-pid", str(parent.pid))
    parent.kill()
    parent.wait()
    assert server.process is not None and server.process.wait(20) == 0


def test_routes_need_the_token(server: Server) -> None:
    body = {"instance_id": "answer", "agent_name": "nop"}
    for method, path in [
        ("POST", "/run"),
        ("PUT", "/trials/x"),
        ("GET", "/trials/x"),
        ("DELETE", "/trials/x"),
        ("POST", "/flush"),
        ("GET", "/tasks"),
    ]:
        answer = httpx.request(method, server.url + path, json=body)
        assert answer.status_code == 401, path
        assert answer.json()["error"]["code"] == "unauthorized"
    assert httpx.get(server.url + "/health").status_code == 200


def test_errors_have_one_shape(server: Server) -> None:
    headers = {"Authorization": f"Bearer {SECRET}"}
    with httpx.Client(base_url=server.url, headers=headers) as http:
        unknown = http.get("/trials/never-started")
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "unknown_trial")
        odd = http.put("/trials/..%2f..%2fetc", json={"instance_id": "answer"})
        assert odd.status_code in (404, 422)
        hidden = http.put("/trials/.base", json={"instance_id": "answer"})
        assert (hidden.status_code, hidden.json()["error"]["code"]) == (422, "invalid_trial_id")
        assert "begins with '.'" in hidden.json()["error"]["message"]
        wrong = http.put("/trials/ok", json={"agent_name": "nop"})
        assert wrong.status_code == 422 and "instance_id" in wrong.json()["error"]["message"]
        assert "answer" in http.get("/tasks").json()["tasks"]
        run = http.post("/run", json={"instance_id": "answer", "agent_name": "nop"}, timeout=60)
        assert run.json()["reward"] == 0.0


def test_two_servers_do_not_share_a_trials_directory(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "LOCK_WAIT_S", 0.2)
    with pytest.raises(UserError, match="another agent server works in it"):
        main.lock_trials(server.trials)


def test_large_requests_are_refused(server: Server) -> None:
    url, headers = f"{server.url}/trials/large", {"authorization": f"Bearer {SECRET}"}
    body = b'{"instance_id": "answer", "more": "' + b"x" * (5 << 20) + b'"}'

    def chunks():
        for at in range(0, len(body), 65536):
            yield body[at : at + 65536]

    for content in (body, chunks()):
        answer = httpx.put(url, content=content, headers=headers)
        assert answer.status_code == 413, answer.text[:200]
        assert answer.json()["error"]["code"] == "request_too_large"
    assert httpx.get(url, headers=headers).status_code == 404


Started = Callable[..., tuple[int, str]]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Started:
    """Start a server in this process that must not come up: its exit status and last words."""
    monkeypatch.delenv("HARBOR_ADMIN_SECRET", raising=False)

    def run(*flags: str) -> tuple[int, str]:
        try:
            code = main.main(list(flags))
        except SystemExit as ended:  # of argparse
            code = int(str(ended.code))
        told = capsys.readouterr()
        assert not told.out
        return code, told.err

    return run


WRONG = {
    "both-ports": (["--port", "8500", "--dashboard-port", "8500"], "both 8500"),
    "absent-tasks": (["--tasks-dir", "absent"], "--tasks-dir absent: no such directory"),
    "no-port": (["--port", "99999"], "--port 99999 is no port"),
    "no-page": (["--dashboard-port", "-1"], "--dashboard-port -1 is no port"),
    "open-host": (["--host", "0.0.0.0"], "set HARBOR_ADMIN_SECRET"),
    "unknown": (["--max-concurent", "3"], "did you mean --max-concurrent"),
    "sandbox": (["--sandbox", "dokcer"], "did you mean docker"),
    "nan": (["--agent-timeout", "nan"], "--agent-timeout nan must be above 0"),
    "infinite": (["--agent-timeout", "1e999"], "--agent-timeout inf must be above 0"),
    "negative": (["--images-cache-gb", "-1"], "--images-cache-gb -1.0 must be above 0"),
    "no-slots": (["--max-concurrent", "0"], "--max-concurrent 0 must be above 0"),
    "file": (["--trials-dir", "task.toml"], "--trials-dir task.toml: File exists"),
    "images": (["--sandbox", "daytona", "--images", "buildah"], "Harbor builds the images"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_start_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Started, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "task.toml").touch()
    flags, words = WRONG[kind]
    code, told = start("--tasks-dir", ".", "--port", "0", *flags)
    assert code == 2 and words in told, told
    left = {entry.name for entry in tmp_path.iterdir()} - {"task.toml"}
    ran = kind in ("images", "sandbox", "no-port", "no-page")  # as far as to the sandbox
    assert left <= ({"trials"} if ran else set())


def test_a_port_in_use_is_named_with_its_flag(tmp_path: Path, start: Started) -> None:
    flags = ["--tasks-dir", str(tmp_path), "--trials-dir", str(tmp_path / "trials")]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        code, told = start(*flags, "--port", port)
        assert code == EXIT_BUSY and port in told and "with --port, or 0 for a free one" in told
        code, told = start(*flags, "--port", "0", "--dashboard-port", port)
        assert code == EXIT_BUSY and port in told
        assert "with --dashboard-port, or leave it out" in told


def test_the_variable_is_named_when_it_names_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Started
) -> None:
    monkeypatch.setenv("HARBOR_TASKS_DIR", str(tmp_path / "absent"))
    code, told = start()
    assert code == 2 and f"HARBOR_TASKS_DIR {tmp_path}/absent: no such directory" in told
    monkeypatch.setenv("HARBOR_TASKS_DIR", "")
    code, told = start()
    assert code == 2 and "no tasks: give --tasks-dir" in told


def test_a_wrong_setting_of_the_agent_is_refused(tmp_path: Path) -> None:
    config = tmp_path / "agent.yaml"
    config.write_text("agent:\n  sytem_template: hi\n")
    command = [sys.executable, "-m", "miles_core.agent_server.main", "--port", "0"]
    command += ["--tasks-dir", str(tmp_path), "--trials-dir", str(tmp_path / "trials")]
    command += ["--agent-config", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "agent.sytem_template" in done.stderr
    assert "Traceback" not in done.stderr
