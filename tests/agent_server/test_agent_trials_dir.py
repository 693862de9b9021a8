"""The trials directory: full, read-only, removed under the server; and results that wait in it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

pytest.importorskip("harbor")
from agent_server_helpers import SECRET, Server, assert_no_verdict, make_task  # noqa: E402

from miles_core.agent_server.client import (  # noqa: E402
    AgentServerError,
    AgentServerUnreachable,
)
from miles_core.agent_server.protocol import TrialRequest  # noqa: E402
from miles_core.errors import UserError  # noqa: E402
from miles_core.serving import EXIT_USAGE, write_ready_file  # noqa: E402
from miles_core.verdicts import Cause  # noqa: E402

pytestmark = pytest.mark.agent_env

HEADERS = {"authorization": f"Bearer {SECRET}"}
WAITS = "#!/bin/bash\nsleep 4\necho 42 > /app/answer.txt\n"


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    make_task(tmp_path / "tasks", "answer")
    make_task(tmp_path / "tasks", "waits", solve=WAITS)
    return tmp_path / "tasks"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own, where `trials` is."""
    place = tmp_path / "trials"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.fixture
def own(tmp_path: Path, tasks: Path) -> Iterator[Server]:
    made = Server(tmp_path, tasks, "--max-concurrent", "2", "--keep-trials", "2")
    yield made
    if made.process is not None and made.process.poll() is None:
        made.stop()


def fill(place: Path) -> Path:
    """Leave no room; the file that takes it."""
    file = place / "filling"
    with open(file, "wb", buffering=0) as opened:
        while True:
            try:
                opened.write(bytes(4096))
            except OSError:
                return file


def start(server: Server, trial_id: str, task: str = "answer") -> None:
    request = TrialRequest(instance_id=task, agent_name="oracle")
    server.call(lambda client: client.start(trial_id, request))


def put(server: Server, trial_id: str) -> httpx.Response:
    body = {"instance_id": "answer", "agent_name": "oracle"}
    url = f"{server.url}/trials/{trial_id}"
    return httpx.put(url, json=body, headers=HEADERS, timeout=30, trust_env=False)


def ended(server: Server, trial_id: str):
    status = server.call(lambda client: client.wait(trial_id, 60))
    assert status.state == "ended"
    return status.result


def test_a_full_disk_refuses_trials_and_gives_results(disk: Path, own: Server) -> None:
    start(own, "done")
    assert ended(own, "done").reward == 1.0
    start(own, "cut", "waits")
    own.stop(signal.SIGKILL)
    filling = fill(disk)
    own.start()
    assert ended(own, "done").reward == 1.0
    assert ended(own, "cut").verdict.cause is Cause.SERVER_RESTARTED
    for answer in (
        put(own, "new"),
        httpx.post(
            f"{own.url}/run",
            json={"instance_id": "answer", "agent_name": "nop", "trial_id": "new"},
            headers=HEADERS,
            timeout=30,
            trust_env=False,
        ),
    ):
        assert answer.status_code == 503 and int(answer.headers["retry-after"]) > 0
        error = answer.json()["error"]
        assert error["code"] == "disk_full" and "No space left" in error["message"]
    assert not (disk / "new").exists()
    assert own.call(lambda client: client.health()).status == "ready"
    filling.unlink()
    assert put(own, "new").status_code == 200
    assert ended(own, "new").reward == 1.0
    assert (disk / "cut/result.json").exists()  # it was written when there was room


def test_a_directory_that_cannot_be_written_is_told_at_the_start(disk: Path, tasks: Path) -> None:
    (disk / ".lock").touch()
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    told = run_server(tasks, "--trials-dir", str(disk))
    assert f"--trials-dir {disk}: Read-only file system" in told


def test_a_ready_file_that_cannot_be_written_is_told(tmp_path: Path, tasks: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    flags = ["--trials-dir", str(tmp_path / "t"), "--ready-file"]
    assert f"--ready-file {place} is a folder" in run_server(tasks, *flags, str(place))
    (place / "file").touch()
    assert "--ready-file" in run_server(tasks, *flags, str(place / "file" / "ready"))
    assert os.listdir(place) == ["file"]
    with pytest.raises(UserError, match="is a folder"):
        write_ready_file(place, "127.0.0.1", 1)
    assert sorted(os.listdir(tmp_path)) == ["place", "tasks"]


def run_server(tasks: Path, *flags: str) -> str:
    """What a server says that cannot start."""
    command = [sys.executable, "-m", "miles_core.agent_server.main", "--port", "0"]
    command += ["--tasks-dir", str(tasks), *flags]
    env = {**os.environ, "HARBOR_ADMIN_SECRET": SECRET}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    assert ran.returncode == EXIT_USAGE, ran.stderr
    assert "Traceback" not in ran.stderr and ran.stderr.startswith("miles-agent-server: ")
    return ran.stderr


@pytest.mark.parametrize("how", ["removed", "replaced", "emptied"])
def test_a_directory_that_goes_under_a_trial_gives_no_reward(own: Server, how: str) -> None:
    start(own, "long", "waits")
    while own.call(lambda client: client.wait("long", 0)).phase != "agent":
        time.sleep(0.05)
    if how == "emptied":
        shutil.rmtree(own.trials / "long")
    else:
        shutil.rmtree(own.trials)
    if how == "replaced":
        own.trials.mkdir()
    words = {"removed": "is gone|is another one", "emptied": "was removed while"}
    words["replaced"] = "is another one"  # as it may be too after Harbor has made it anew
    assert_no_verdict(ended(own, "long"), Cause.INTERNAL_ERROR, words[how])
    if how == "emptied":
        assert own.run("answer").reward == 1.0
        return
    with pytest.raises(AgentServerUnreachable, match=f"503.*({words[how]})"):
        own.call(lambda client: client.health())
    answer = put(own, "next")
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "trials_dir_gone"
    assert not (own.trials / "next").exists()
    assert_no_verdict(ended(own, "long"), Cause.INTERNAL_ERROR, words[how])


def test_results_that_were_not_fetched_are_not_evicted(own: Server) -> None:
    names = [f"quick-{number}" for number in range(5)]
    for name in names:
        start(own, name)
    while len(list(own.trials.glob("quick-*/result.json"))) < len(names):
        time.sleep(0.05)
    for name in names:
        assert ended(own, name).reward == 1.0
    with pytest.raises(AgentServerError) as unknown:
        own.call(lambda client: client.wait("another", 0))
    assert unknown.value.status == 404


def test_the_age_of_an_ended_trial_grows_from_its_end(own: Server) -> None:
    start(own, "one")
    assert ended(own, "one").reward == 1.0
    first = own.call(lambda client: client.wait("one", 0)).age_s
    time.sleep(0.2)
    second = own.call(lambda client: client.wait("one", 0)).age_s
    assert 0.2 <= second - first < 30 and first < 30
    past = time.time() - 500
    os.utime(own.trials / "one/result.json", (past, past))
    assert own.call(lambda client: client.wait("one", 0)).age_s >= 500


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_a_body_without_its_content_type_is_told_so(own: Server, kind: str | None) -> None:
    content = b'{"instance_id": "answer", "agent_name": "nop"}'
    headers = {**HEADERS, **({"content-type": kind} if kind else {})}
    for method, path in (("PUT", "/trials/x"), ("POST", "/run"), ("POST", "/flush")):
        answer = httpx.request(
            method, own.url + path, content=content, headers=headers, trust_env=False
        )
        assert answer.status_code == 422
        message = answer.json()["error"]["message"]
        assert message.startswith("content-type: it must be application/json, ")
        assert (kind or "there is none") in message
