"""Whatever clients send: no 500, no lost connection, no turn of a refused request."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from client_engine import StepEngine
from client_fuzz import MANY, ODD, check_error, each, mutated, raw_json, replaced
from hypothesis import given, settings
from hypothesis import strategies as st
from session_helpers import TOKEN, Agent

CONTROL = {"Authorization": f"Bearer {TOKEN}"}


VALID: dict[str, Any] = {
    "model": "policy",
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "u"}]},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "r",
            "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "tool_call_id": "c", "content": "t"},
    ],
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "bash",
                "description": "d",
                "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
            },
        }
    ],
    "tool_choice": "auto",
    "n": 1,
    "stop": ["x"],
    "max_tokens": 50,
    "max_completion_tokens": 60,
    "temperature": 0.5,
    "top_p": 0.9,
    "stream": False,
    "stream_options": {"include_usage": True},
    "logprobs": False,
    "response_format": {"type": "text"},
    "seed": 1,
}
SESSION: dict[str, Any] = {
    "session_id": "name",
    "max_seq_len": 4000,
    "max_turns": 5,
    "sampling_params": {"temperature": 1.0, "max_tokens": 9, "top_p": 0.9, "top_k": 3},
}


def send(
    url: str, http: httpx.Client, steps: StepEngine, content: bytes, headers: dict[str, Any]
) -> None:
    """A request to a session of its own: answered and recorded, or refused and not."""
    agent = Agent(url, http, max_seq_len=100_000)
    steps.reset([], lambda prompt: "ok")
    address = f"{agent.url}/v1/chat/completions"
    response = http.post(address, content=content, headers=headers)
    assert response.status_code in (200, 400, 413, 415), response.text
    found = agent.samples()
    if response.status_code == 200:
        assert found["model_calls"] == 1 and sum(found["samples"][0]["loss_mask"]) > 0
    else:
        check_error(response)
        assert found["model_calls"] == 0 and found["samples"] == [] and steps.calls == []
    assert agent.delete() == 204


KINDS = st.sampled_from(
    ["application/json", "text/plain", "", "application/x-www-form-urlencoded",
     "multipart/form-data", "application/json; charset=utf-16", b"\xc3\xa9"]
)  # fmt: skip


@MANY
@given(body=st.one_of(st.binary(max_size=80), raw_json.map(str.encode)), kind=KINDS)
def test_any_body(url: str, http: httpx.Client, steps: StepEngine, body: bytes, kind: Any) -> None:
    send(url, http, steps, body, {"content-type": kind})


@MANY
@given(body=mutated(VALID))
def test_a_request_that_is_nearly_right(
    url: str, http: httpx.Client, steps: StepEngine, body: str
) -> None:
    send(url, http, steps, body.encode(), {"content-type": "application/json"})


@MANY
@given(body=mutated({**VALID, "stream": True}))
def test_a_stream_that_is_nearly_right(
    url: str, http: httpx.Client, steps: StepEngine, body: str
) -> None:
    send(url, http, steps, body.encode(), {"content-type": "application/json"})


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-8-sig", "latin-1"])
def test_other_encodings(url: str, http: httpx.Client, steps: StepEngine, encoding: str) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "é"}]}, ensure_ascii=False)
    send(url, http, steps, body.encode(encoding), {"content-type": "application/json"})


def test_a_body_that_is_too_long_is_refused(
    url: str, http: httpx.Client, steps: StepEngine
) -> None:
    body = b'{"messages": [{"role": "user", "content": "' + b"a" * (65 * 2**20) + b'"}]}'
    send(url, http, steps, body, {"content-type": "application/json"})


def open_session(url: str, http: httpx.Client, body: bytes) -> None:
    """A session that is opened can be used: what it cannot do is refused at once."""
    response = http.post(f"{url}/sessions", content=body, headers=CONTROL)
    assert response.status_code in (200, 400), response.text
    if response.status_code == 400:
        check_error(response)
        return
    asked = {"messages": [{"role": "user", "content": "u"}]}
    session = f"{url}{response.json()['path']}"
    answer = http.post(f"{session}/v1/chat/completions", json=asked)
    assert answer.status_code in (200, 400), answer.text
    assert http.delete(session, headers=CONTROL).status_code == 204


@MANY
@given(
    body=st.one_of(
        st.binary(max_size=40), raw_json.map(str.encode), mutated(SESSION).map(str.encode)
    )
)
def test_any_session(url: str, http: httpx.Client, steps: StepEngine, body: bytes) -> None:
    steps.reset([], lambda prompt: "ok")
    open_session(url, http, body)


@each(SESSION)
def test_a_session_with_an_odd_value(
    url: str, http: httpx.Client, steps: StepEngine, path: tuple[Any, ...]
) -> None:
    steps.reset([], lambda prompt: "ok")
    for text in ODD:
        open_session(url, http, replaced(SESSION, path, text))


@each(VALID)
def test_a_request_with_an_odd_value(
    url: str, http: httpx.Client, steps: StepEngine, path: tuple[Any, ...]
) -> None:
    for text in ODD:
        send(url, http, steps, replaced(VALID, path, text), {"content-type": "application/json"})


PATHS = st.one_of(
    st.sampled_from(
        ["/", "//", "/sessions/", "/sessions//samples", "/sessions/{id}/", "/sessions/{id}/v1",
         "/sessions/{id}/v1/chat/completions/", "/sessions/{id}/v1/models/a%2Fb", "/v1/models",
         "/sessions/{id}/v1/models/%ff", "/sessions/%00/samples", "/sessions/{id}/v1/responses",
         "/sessions/../health", "/sessions/{id}%2Fsamples", "/sessions/" + "a" * 5000]
    ),
    st.text(st.characters(min_codepoint=33, max_codepoint=126, exclude_characters="?#"),
            max_size=20).map(lambda text: "/" + text),
)  # fmt: skip
METHODS = st.sampled_from(["GET", "POST", "DELETE", "PUT", "HEAD", "OPTIONS", "PATCH", "TRACE"])


@settings(MANY, max_examples=100)
@given(path=PATHS, method=METHODS, key=st.binary(max_size=20))
def test_any_route(url: str, http: httpx.Client, path: str, method: str, key: bytes) -> None:
    """An unknown route is told as one; a known one without the control token is refused."""
    agent = Agent(url, http)
    address = httpx.URL(url, raw_path=path.replace("{id}", agent.id).encode())
    plain = bytes(byte for byte in key if 32 < byte < 127 or byte > 160)
    headers = {"Idempotency-Key": plain, "Content-Type": "application/json"}
    response = http.request(method, address, headers=headers, content=b"{}")
    known = response.status_code == 200 and method in ("GET", "HEAD")
    assert known or response.status_code in (307, 400, 401, 404, 405), response.text
    if response.status_code in (401, 404, 405) and method != "HEAD":
        check_error(response)
    assert agent.samples()["model_calls"] == 0


def test_odd_keys_and_methods(url: str, http: httpx.Client, steps: StepEngine) -> None:
    agent = Agent(url, http)
    steps.reset([], lambda prompt: "ok")
    body = json.dumps({"messages": [{"role": "user", "content": "u"}]}).encode()
    for key in (b"", b"\xff\xfe", b"a" * 5000, b"a, b"):
        headers = {"Idempotency-Key": key}
        address = f"{agent.url}/v1/chat/completions"
        response = http.post(address, content=body, headers=headers)
        assert response.status_code in (200, 400), response.text
    assert agent.samples()["model_calls"] >= 1
