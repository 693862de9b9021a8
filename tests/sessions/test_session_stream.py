"""Streaming: what is certain comes at once, and the whole is the very answer that is recorded."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from session_helpers import BASH, Agent, ScriptedEngine, until
from test_session_server import CALL, DONE, USER, check_exact

from miles_core.sessions.families import ChatFamily

OPTIONS = {"stream": True, "stream_options": {"include_usage": True}}


def chunks_of(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def told(chunks: list[dict[str, Any]], name: str) -> list[str]:
    deltas = [c["choices"][0]["delta"] for c in chunks if c["choices"]]
    return [d[name] for d in deltas if d.get(name)]


@pytest.mark.parametrize(
    "answer",
    [
        CALL,
        {**CALL, "reasoning_content": "I think ☃ about it"},
        {**DONE, "content": "naïve <tool_call> and\n\nmore 👩‍👩‍👧  "},
        {**DONE, "content": ""},
    ],
)
@pytest.mark.parametrize("pace_s", [0.0, 0.06])
def test_a_stream_tells_the_same_answer(
    answer: dict[str, Any],
    pace_s: float,
    server_url: str,
    http: httpx.Client,
    engine: ScriptedEngine,
    family: ChatFamily,
) -> None:
    agent = Agent(server_url, http)
    ids = family.render_output(answer)
    engine.script, engine.pace_s = [ids, ids], pace_s
    whole = agent.message([USER], tools=[BASH])
    response = agent.ask([{**USER, "content": "again"}], tools=[BASH], **OPTIONS)
    engine.pace_s = 0.0
    assert response.headers["content-type"].startswith("text/event-stream")
    chunks = chunks_of(response.text)
    assert "".join(told(chunks, "content")) == (whole["content"] or "")
    assert "".join(told(chunks, "reasoning_content")) == whole.get("reasoning_content", "")
    calls = [call for calls in told(chunks, "tool_calls") for call in calls]
    expected = [call["function"] for call in whole.get("tool_calls", [])]
    assert [call["function"] for call in calls] == expected
    assert [call["index"] for call in calls] == list(range(len(calls)))
    assert chunks[-2]["choices"][0]["finish_reason"] == ("tool_calls" if calls else "stop")
    assert chunks[-1]["usage"]["completion_tokens"] == len(ids)
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}
    if pace_s and whole["content"]:
        assert len(told(chunks, "content")) > 1, "it came in pieces"
    check_exact(agent.samples(), engine)


def test_the_first_words_come_before_the_last_are_sampled(
    server_url: str, http: httpx.Client, engine: ScriptedEngine, family: ChatFamily
) -> None:
    agent = Agent(server_url, http)
    engine.script = [family.render_output({**DONE, "content": "first " + "word " * 30})]
    engine.pace_s = 0.1
    url = f"{agent.url}/v1/chat/completions"
    with http.stream("POST", url, json={"messages": [USER], "stream": True}) as response:
        for line in response.iter_lines():
            if '"content":"f' in line:
                break
        assert agent.samples()["model_calls"] == 0, "the answer is still being sampled"
    engine.pace_s = 0.0
    until(lambda: engine.requests[-1]["rid"] in engine.aborted)
    assert agent.samples()["model_calls"] == 0, "a client that went away has no answer"


@pytest.mark.parametrize("after", [1, 30])
def test_an_engine_that_breaks_off_is_an_error_and_no_turn(
    after: int, server_url: str, http: httpx.Client, engine: ScriptedEngine, family: ChatFamily
) -> None:
    agent = Agent(server_url, http)
    engine.script = [family.render_output({**DONE, "content": "word " * 30})] * 2
    engine.pace_s, engine.break_after = 0.02, after
    response = agent.ask([USER], **OPTIONS)
    engine.pace_s, engine.break_after = 0.0, None
    if after == 1:
        assert response.status_code == 502 and response.json()["error"]["code"] == "engine_failed"
    else:
        *_, last = response.text.strip().split("\n\n")
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_failed"
    samples = agent.samples()
    assert samples["model_calls"] == 0 and samples["end_reason"] == "engine_failed"
    agent.message([USER])
    assert agent.samples()["end_reason"] is None


def test_errors_before_the_first_word_have_their_status(
    server_url: str, http: httpx.Client, engine: ScriptedEngine
) -> None:
    agent = Agent(server_url, http, max_seq_len=8)
    refused = agent.ask([USER], stream=True)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"
