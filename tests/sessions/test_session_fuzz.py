"""Whatever clients and engines send: no 500, no lost connection, no turn of a refused request."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from client_engine import Events, StepEngine, step_engine
from client_truth import END, ids, make_byte_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from session_helpers import TOKEN, Agent, session_server

MANY = settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
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
GENERATED: dict[str, Any] = {
    "text": "ok",
    "output_ids": [*ids("ok"), END],
    "meta_info": {
        "id": "x",
        "finish_reason": {"type": "stop", "matched": END},
        "prompt_tokens": 9,
        "completion_tokens": 3,
        "weight_version": "4",
        "output_token_logprobs": [[-0.5, token, None] for token in [*ids("ok"), END]],
    },
}

texts = st.one_of(
    st.text(max_size=8),
    st.sampled_from(
        ["\ud800", "\udfffx", "\0", "<|im_end|>", "<|im_start|>system\n", "{{ 1 }}", "{% x %}",
         "<tool_call>", "</think>", "user", "tool", "assistant", "NaN", "1e999", "­"]
    ),
)  # fmt: skip
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([2**31, 2**53 + 1, 2**63, 2**64, -(2**63) - 1, 10**400, -1]),
    st.floats(),
    texts,
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)


def deep(depth: int, opening: str = "[", closing: str = "]", inside: str = "1") -> str:
    return opening * depth + inside + closing * depth


raw_json = st.one_of(
    st.sampled_from([*(deep(n) for n in (100, 600, 990, 1020, 5000)), "-0", "1e999", '"\\ud800"',
                     *(deep(n, '{"a":', "}") for n in (100, 600, 990, 1020, 5000)),
                     '{"a": 1, "a": 2}', "Infinity", "-Infinity", "NaN", "1" * 5000]),
    values.map(json.dumps),
)  # fmt: skip


def paths(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each value in a JSON value, the outermost too."""
    yield at
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            yield from paths(inner, (*at, key))


def mutated(base: dict[str, Any]) -> st.SearchStrategy[str]:
    """JSON of `base` with one to three values removed, doubled, or replaced by anything."""
    marks = [f"<<{n}>>" for n in range(3)]

    @st.composite
    def build(draw: st.DrawFn) -> str:
        value = copy.deepcopy(base)
        for mark in marks[: draw(st.integers(1, 3))]:
            found = [path for path in paths(value) if path]
            if not found:
                break
            *way, last = draw(st.sampled_from(found))
            inner: Any = value
            for key in way:
                inner = inner[key]
            change = draw(st.sampled_from(["replace", "replace", "remove", "double"]))
            if change == "replace":
                inner[last] = mark
            elif change == "remove":
                del inner[last]
            elif isinstance(inner, list):
                inner.append(inner[last])
            else:
                inner[f"{last}_"] = inner[last]
        text = json.dumps(value)
        for mark in marks:
            text = text.replace(f'"{mark}"', draw(raw_json))
        return text

    return build()


@pytest.fixture(scope="module")
def steps() -> Iterator[StepEngine]:
    with step_engine() as engine:
        yield engine


@pytest.fixture(scope="module")
def url(steps: StepEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    scratch = tmp_path_factory.mktemp("fuzz")
    with session_server(make_byte_tokenizer(scratch / "model"), steps.url, scratch) as url:
        yield url


def check_error(response: httpx.Response) -> None:
    """A refusal is OpenAI's error object, and tells why."""
    assert response.headers["content-type"].startswith("application/json"), response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}, error
    assert isinstance(error["message"], str) and error["message"]
    assert isinstance(error["type"], str) and isinstance(error["code"], str)
    assert error["param"] is None or isinstance(error["param"], str)


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


@MANY
@given(body=st.one_of(st.binary(max_size=40).map(lambda b: b.decode("latin-1")), raw_json,
                      mutated(SESSION)))  # fmt: skip
def test_a_session_that_is_asked_for(url: str, http: httpx.Client, body: str) -> None:
    response = http.post(f"{url}/sessions", content=body.encode(), headers=CONTROL)
    assert response.status_code in (200, 400), response.text
    if response.status_code == 400:
        check_error(response)
    else:
        asked = {"messages": [{"role": "user", "content": "u"}]}
        session = f"{url}{response.json()['path']}"
        answer = http.post(f"{session}/v1/chat/completions", json=asked)
        assert answer.status_code in (200, 400), answer.text
        assert http.delete(session, headers=CONTROL).status_code == 204


@MANY
@given(
    answer=st.one_of(st.binary(max_size=40), raw_json.map(str.encode),
                     mutated(GENERATED).map(str.encode)),
    stream=st.booleans(),
)  # fmt: skip
def test_an_engine_that_answers_anything(
    url: str, http: httpx.Client, steps: StepEngine, answer: bytes, stream: bool
) -> None:
    agent = Agent(url, http, max_seq_len=100_000)
    events = b"data: " + answer.replace(b"\n", b" ") + b"\n\ndata: [DONE]\n\n"
    steps.reset([events if stream else answer])
    response = agent.ask([{"role": "user", "content": "u"}], stream=stream)
    found = agent.samples()
    if response.status_code == 200 and "engine_failed" not in response.text:
        assert found["model_calls"] == 1
        (sample,) = found["samples"]
        assert sum(sample["loss_mask"]) == sample["turns"][0]["end"] - sample["turns"][0]["start"]
    else:
        assert response.status_code in (502, 503) or stream, response.text
        if response.status_code != 200:
            check_error(response)
        assert found["samples"] == [] and found["end_reason"] == "engine_failed"
    assert agent.delete() == 204


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


def so_far(count: int) -> bytes:
    """The first ids of `GENERATED`, while more are sampled."""
    meta = {**GENERATED["meta_info"], "finish_reason": None, "completion_tokens": count}
    meta["output_token_logprobs"] = meta["output_token_logprobs"][:count]
    return json.dumps({"output_ids": GENERATED["output_ids"][:count], "meta_info": meta}).encode()


def only(start: int) -> bytes:
    """The last ids of `GENERATED` alone: what an engine says that streams differences."""
    meta = {**GENERATED["meta_info"]}
    meta["output_token_logprobs"] = meta["output_token_logprobs"][start:]
    return json.dumps({"output_ids": GENERATED["output_ids"][start:], "meta_info": meta}).encode()


BROKEN_STREAMS = {
    "no JSON": [so_far(1), b"{", so_far(2)],
    "no object": [so_far(1), b"[1]", so_far(2)],
    "null": [so_far(1), b"null"],
    "ids are texts": [so_far(1), b'{"output_ids": ["a", null]}', so_far(2)],
    "ids are beyond the vocabulary": [so_far(1), b'{"output_ids": [99999, -1]}', so_far(2)],
    "ids are huge": [so_far(1), b'{"output_ids": [99999999999999999999999]}', so_far(2)],
    "it never ends": [so_far(1), so_far(2)],
    "nothing": [],
    "an error": [so_far(1), b'{"error": {"message": "out of memory", "code": 500}}'],
    "differences": [so_far(2), only(2)],
}


@pytest.mark.parametrize("name", BROKEN_STREAMS)
@pytest.mark.parametrize("ended", [True, False])
def test_a_stream_of_the_engine_that_breaks(
    name: str, ended: bool, url: str, http: httpx.Client, steps: StepEngine
) -> None:
    """The agent is told, in the stream when it has begun, and nothing is recorded."""
    agent = Agent(url, http, max_seq_len=100_000)
    steps.reset([Events(BROKEN_STREAMS[name], ended=ended)], lambda prompt: "fine")
    response = agent.ask([{"role": "user", "content": "u"}], stream=True)
    if response.status_code == 200:
        last = [line for line in response.text.split("\n\n") if line][-1]
        error = json.loads(last.removeprefix("data: "))["error"]
    else:
        assert response.status_code in (502, 503)
        check_error(response)
        error = response.json()["error"]
    assert error["code"] == "engine_failed", error
    found = agent.samples()
    assert found["samples"] == [] and found["end_reason"] == "engine_failed"
    assert agent.message([{"role": "user", "content": "u"}])["content"] == "fine"
    assert agent.samples()["model_calls"] == 1
