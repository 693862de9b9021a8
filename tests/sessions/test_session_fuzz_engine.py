"""Whatever an engine answers: it is recorded exactly, or the agent is told that it failed."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from client_engine import Events, StepEngine
from client_fuzz import MANY, ODD, check_error, each, mutated, raw_json, replaced
from client_truth import END, ids
from hypothesis import given
from hypothesis import strategies as st
from session_helpers import Agent

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


@MANY
@given(
    answer=st.one_of(st.binary(max_size=40), raw_json.map(str.encode),
                     mutated(GENERATED).map(str.encode)),
    stream=st.booleans(),
)  # fmt: skip
def test_an_engine_that_answers_anything(
    url: str, http: httpx.Client, steps: StepEngine, answer: bytes, stream: bool
) -> None:
    be_answered(url, http, steps, answer, stream)


@each(GENERATED)
def test_an_engine_with_an_odd_value(
    url: str, http: httpx.Client, steps: StepEngine, path: tuple[Any, ...]
) -> None:
    for text in ODD:
        be_answered(url, http, steps, replaced(GENERATED, path, text), False)


def be_answered(
    url: str, http: httpx.Client, steps: StepEngine, answer: bytes, stream: bool
) -> None:
    """The engine's answer is recorded and exact, or the agent is told that the engine failed."""
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
