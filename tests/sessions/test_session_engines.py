"""The list of engines is replaced while sessions live; what is stale or broken is not recorded."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from session_helpers import TOKEN, Agent, ScriptedEngine, serving, session_server
from test_session_server import DONE, USER, check_exact

from miles_core.sessions.families import ChatFamily

CONTROL = {"Authorization": f"Bearer {TOKEN}"}


def route(http: httpx.Client, url: str, version: int, *engines: str) -> None:
    body = {"urls": list(engines), "weight_version": version}
    assert http.put(f"{url}/engines", json=body, headers=CONTROL).status_code == 204


@pytest.fixture(scope="module")
def other() -> Iterator[ScriptedEngine]:
    engine = ScriptedEngine()
    with serving(engine):
        yield engine


@pytest.fixture(scope="module")
def breaking() -> Iterator[str]:
    """An engine that takes requests and closes the connection without an answer."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(8)

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                connection.recv(65536)
                connection.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(10)


def test_only_a_control_client_with_a_whole_list_replaces_it(
    server_url: str, engine: ScriptedEngine, http: httpx.Client
) -> None:
    body = {"urls": [engine.url], "weight_version": 3}
    assert http.put(f"{server_url}/engines", json=body).status_code == 401
    for wrong in ({}, {"urls": [engine.url]}, {**body, "weight_version": -1}, {**body, "x": 1}):
        answer = http.put(f"{server_url}/engines", json=wrong, headers=CONTROL)
        assert answer.status_code == 400, wrong
    route(http, server_url, 3, engine.url)


def test_calls_wait_for_the_first_engine(
    tokenizer_dir: Path,
    engine: ScriptedEngine,
    http: httpx.Client,
    family: ChatFamily,
    tmp_path: Path,
) -> None:
    with session_server(tokenizer_dir, "http://127.0.0.1:9", tmp_path) as url:
        route(http, url, 0)
        agent = Agent(url, http)
        engine.script = [family.render_output(DONE)]
        asking = threading.Thread(target=agent.message, args=([USER],))
        asking.start()
        asking.join(0.5)
        assert asking.is_alive()
        route(http, url, 3, engine.url)
        asking.join(20)
        assert not asking.is_alive()
        check_exact(agent.samples(), engine)


@pytest.mark.parametrize("fault", ["stale", "unable", "broken"])
def test_a_call_goes_to_another_engine(
    fault: str,
    server_url: str,
    engine: ScriptedEngine,
    other: ScriptedEngine,
    breaking: str,
    http: httpx.Client,
    family: ChatFamily,
) -> None:
    other.version = "2"
    bad = breaking if fault == "broken" else other.url
    route(http, server_url, 3, engine.url, bad)
    refused = 0
    for number in range(6):
        agent = Agent(server_url, http)
        engine.script = [family.render_output(DONE)]
        other.script = [503 if fault == "unable" else family.render_output(DONE)]
        agent.message([{"role": "user", "content": f"{number}"}])
        refused += not other.script
        # What the other engine sampled, or began, is nowhere.
        check_exact(agent.samples(), engine)
    assert fault == "broken" or refused, "no session belonged to the other engine"


def test_an_engine_with_other_weights_alone_is_an_error(
    server_url: str, other: ScriptedEngine, http: httpx.Client, family: ChatFamily
) -> None:
    other.version = "2"
    route(http, server_url, 3, other.url)
    agent = Agent(server_url, http)
    other.script = [family.render_output(DONE)]
    answer = agent.ask([USER])
    assert answer.status_code == 503 and "serves version 2, not 3" in answer.text
    samples = agent.samples()
    assert samples["model_calls"] == 0 and samples["end_reason"] == "engine_failed"
