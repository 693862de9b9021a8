"""The server as a process: its flags, its end, and engines that cannot be reached."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from session_helpers import TOKEN, Agent, ScriptedEngine, server_command, session_server, until
from test_session_server import DONE, USER, check_exact

from miles_core.errors import UserError
from miles_core.sessions import server
from miles_core.sessions.families import ChatFamily
from miles_core.sessions.journal import Journal
from miles_core.sessions.store import locked


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--engine-url", "localhost:3000"), "localhost:3000"),
        (("--engine-url", ""), "--engine-url"),
        (("--engine-url", "http://"), "--engine-url"),
        (("--session-timeout", "-1"), "--session-timeout"),
        (("--engine-timeout", "0"), "--engine-timeout"),
        (("--spill-after", "nan"), "--spill-after"),
        (("--engine-timeout", "inf"), "--engine-timeout"),
        (("--chat-family", "qwen33"), "qwen3"),
        (("--parsers", "mine"), "--parsers"),
        (("--spill-dir", "{file}"), "--spill-dir"),
        (("--spill-dir", "/proc/1"), "--spill-dir"),
        (("--ready-file", "{file}/x"), "--ready-file"),
        (("--tokenizer", "{file}"), "tokenizer.json"),
        (("--port", "99999"), "--port"),
    ],
)
def test_a_flag_that_cannot_be_is_refused_by_name(
    flags: tuple[str, str], said: str, tokenizer_dir: Path, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    given = [flag.replace("{file}", str(file)) for flag in flags]
    command = server_command(tokenizer_dir, "http://127.0.0.1:9", *given)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and said in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and "serving" not in done.stdout


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["{", "[]", ""])
def test_a_broken_tokenizer_is_named(
    name: str, content: str, tokenizer_dir: Path, tmp_path: Path
) -> None:
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_bytes((tokenizer_dir / file).read_bytes())
    (tmp_path / name).write_text(content)
    command = server_command(tmp_path, "http://127.0.0.1:9")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and str(tmp_path / name) in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture
def away() -> Iterator[str]:
    """The URL of an engine that takes no connection: its queue is full."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        address = listener.getsockname()
        waiting = []
        for _ in range(3):
            client = socket.socket()
            client.setblocking(False)
            client.connect_ex(address)
            waiting.append(client)
        yield f"http://127.0.0.1:{address[1]}"
        for client in waiting:
            client.close()


@pytest.mark.parametrize("kind", ["closed", "full"])
def test_another_engine_serves_while_one_takes_no_connection(
    kind: str,
    away: str,
    tokenizer_dir: Path,
    engine: ScriptedEngine,
    http: httpx.Client,
    family: ChatFamily,
    tmp_path: Path,
) -> None:
    gone = "http://127.0.0.1:9" if kind == "closed" else away
    with session_server(tokenizer_dir, gone, tmp_path, "--engine-url", engine.url) as url:
        # About half of the sessions belong to the engine that is away.
        for number in range(6 if kind == "closed" else 3):
            agent = Agent(url, http)
            engine.script = [family.render_output(DONE)]
            agent.message([{"role": "user", "content": f"{number}"}])
            check_exact(agent.samples(), engine)


@pytest.mark.parametrize("kind", ["closed", "full"])
def test_no_engine_at_all_is_told_as_such(
    kind: str, away: str, tokenizer_dir: Path, http: httpx.Client, tmp_path: Path
) -> None:
    gone = "http://127.0.0.1:9" if kind == "closed" else away
    with session_server(tokenizer_dir, gone, tmp_path) as url:
        agent = Agent(url, http)
        response = agent.ask([USER])
        assert response.status_code == 502
        assert response.json()["error"]["code"] == "engine_failed"
        assert gone in response.json()["error"]["message"]
        assert "1800" not in response.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_calls_that_run_when_the_server_is_told_to_end_get_a_typed_error(
    stream: bool, tokenizer_dir: Path, engine: ScriptedEngine, http: httpx.Client, tmp_path: Path
) -> None:
    ready = tmp_path / "ready.json"
    kept = tmp_path / "kept"
    more = ["--ready-file", str(ready), "--spill-dir", str(kept)]
    process = subprocess.Popen(
        server_command(tokenizer_dir, engine.url, *more),
        env={**os.environ, "MILES_SESSION_TOKEN": TOKEN},
    )
    try:
        until(lambda: ready.exists() or process.poll() is not None)
        agent = Agent(json.loads(ready.read_text())["url"], http)
        engine.script, before = ["hang"], len(engine.requests)
        answers: list[httpx.Response] = []
        asking = threading.Thread(
            target=lambda: answers.append(agent.ask([USER], stream=stream)), daemon=True
        )
        asking.start()
        until(lambda: len(engine.requests) > before)
        started = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0 and time.monotonic() - started < 15
        asking.join(20)
    finally:
        process.kill()
        process.wait()
    assert answers[0].status_code == 410
    assert answers[0].json()["error"]["code"] == "session_lost"
    (path,) = kept.glob("*.session")
    assert b'"session_failed"' in path.read_bytes()


def test_a_session_stays_while_its_request_comes_slowly(
    tokenizer_dir: Path,
    engine: ScriptedEngine,
    http: httpx.Client,
    family: ChatFamily,
    tmp_path: Path,
) -> None:
    more = ("--spill-after", "0.1")
    with session_server(tokenizer_dir, engine.url, tmp_path, *more) as url:
        agent = Agent(url, http)
        engine.script = [family.render_output(DONE)] * 2
        first = agent.message([USER])
        body = json.dumps({"messages": [USER, first, USER]}).encode()

        def slowly() -> Iterator[bytes]:
            for at in range(0, len(body), 40):
                time.sleep(0.4)
                yield body[at : at + 40]

        response = http.post(f"{agent.url}/v1/chat/completions", content=slowly())
        assert response.status_code == 200, response.text
        samples = agent.samples()
        check_exact(samples, engine)
        assert [len(s["turns"]) for s in samples["samples"]] == [2]


def test_a_server_without_file_descriptors_goes_on(
    tokenizer_dir: Path, engine: ScriptedEngine, http: httpx.Client, tmp_path: Path
) -> None:
    ready = tmp_path / "ready.json"
    flags = ["--ready-file", str(ready), "--parent-pid", str(os.getpid())]
    process = subprocess.Popen(
        server_command(tokenizer_dir, engine.url, *flags),
        env={**os.environ, "MILES_SESSION_TOKEN": TOKEN},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)),
    )
    try:
        until(lambda: ready.exists() or process.poll() is not None)
        url = json.loads(ready.read_text())["url"]
        agent = Agent(url, http)
        port = int(url.rpartition(":")[2])
        many = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]
        time.sleep(2.0)
        assert process.poll() is None
        for connection in many:
            connection.close()
        until(lambda: http.get(f"{url}/health").status_code == 200)
        assert agent.samples()["model_calls"] == 0
    finally:
        process.terminate()
        assert process.wait(20) in (0, -15)


def test_what_a_server_left_is_read_when_the_disk_is_full(
    tokenizer_dir: Path,
    engine: ScriptedEngine,
    http: httpx.Client,
    family: ChatFamily,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = tmp_path / "kept"
    more = ["--spill-dir", str(kept), "--ready-file", str(tmp_path / "ready.json")]
    process = subprocess.Popen(
        server_command(tokenizer_dir, engine.url, *more),
        env={**os.environ, "MILES_SESSION_TOKEN": TOKEN},
    )
    try:
        until(lambda: (tmp_path / "ready.json").exists() or process.poll() is not None)
        agent = Agent(json.loads((tmp_path / "ready.json").read_text())["url"], http)
        engine.script = [family.render_output(DONE)]
        agent.message([USER])
        before = agent.samples()
    finally:
        process.kill()
        process.wait()

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with server._spill_dir(kept) as directory, locked(directory):
        (path,) = directory.glob("*.session")
        stored = Journal(path).read()
        assert [turn.rid for turn in stored.tree.turns] == [
            turn["rid"] for turn in before["samples"][0]["turns"]
        ]
    (tmp_path / "new").mkdir()
    with pytest.raises(UserError, match="No space left"), server._spill_dir(tmp_path / "new"):
        pass


def test_another_route_says_which_there_are(server_url: str, http: httpx.Client) -> None:
    agent = Agent(server_url, http)
    for route in ("completions", "responses", "embeddings"):
        answer = http.post(f"{agent.url}/v1/{route}", json={})
        assert answer.status_code == 404
        assert "v1/chat/completions" in answer.json()["error"]["message"]
