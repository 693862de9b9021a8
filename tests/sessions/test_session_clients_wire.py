"""What clients see on the wire: streams, models, unknown fields, requests that are sent twice."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

pytest.importorskip("openai")

import openai
from client_engine import Slow, StepEngine
from client_episode import BASH, step
from client_truth import Line, check_samples, ids, system_with_tools, user
from session_helpers import Agent, until

pytestmark = pytest.mark.agent_env

ASKED = [{"role": "user", "content": "begin"}]
BEGUN = Line().prompt(system_with_tools("", [BASH]) + user("begin"))
THOUGHT = "<think>\nlet me see\n</think>\n\n" + step(1)


@pytest.fixture
def agent(url: str, http: httpx.Client) -> Agent:
    return Agent(url, http, max_seq_len=20_000)


@pytest.fixture
def client(agent: Agent) -> Any:
    return openai.OpenAI(base_url=f"{agent.url}/v1", api_key="none", timeout=20, max_retries=0)


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The events of a stream, as a client without a library reads them."""
    last = None
    for line in response.iter_lines():
        if line.startswith("data: "):
            last = line[6:]
            if last != "[DONE]":
                yield json.loads(last)
    assert last == "[DONE]"


def test_a_stream_as_codex_reads_it(agent: Agent, steps: StepEngine) -> None:
    """Deltas put together by hand are the whole answer; usage comes last."""
    steps.reset([THOUGHT])
    body = {
        "model": "policy", "messages": ASKED, "tools": [BASH], "stream": True,
        "stream_options": {"include_usage": True}, "tool_choice": "auto",
        "parallel_tool_calls": False, "store": False, "prompt_cache_key": "x",
    }  # fmt: skip
    url = f"{agent.url}/v1/chat/completions"
    with agent.http.stream("POST", url, json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        chunks = list(events(response))
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    usage = chunks.pop()
    assert usage["choices"] == [] and usage["usage"] == {
        "prompt_tokens": len(BEGUN.answer("").turns()[0][0]),
        "completion_tokens": len(ids(THOUGHT)) + 1,
        "total_tokens": len(BEGUN.answer(THOUGHT).tokens()),
    }
    assert all(chunk.get("usage") is None for chunk in chunks)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["tool_calls"]
    deltas = [choice["delta"] for choice in choices]
    assert deltas[0]["role"] == "assistant"
    assert "".join(delta.get("content") or "" for delta in deltas).strip() == "step 1"
    reasoning = "".join(delta.get("reasoning_content") or "" for delta in deltas)
    assert reasoning.strip() == "let me see"
    calls = [call for delta in deltas for call in delta.get("tool_calls") or []]
    assert {call["index"] for call in calls} == {0}
    assert calls[0]["id"] and calls[0]["type"] == "function"
    assert "".join(call["function"].get("name") or "" for call in calls) == "bash"
    arguments = "".join(call["function"].get("arguments") or "" for call in calls)
    assert json.loads(arguments) == {"command": "echo 1"}
    check_samples(agent.samples(), [BEGUN.answer(THOUGHT)], steps)


def test_a_stream_tells_what_is_known_while_the_engine_samples(
    agent: Agent, steps: StepEngine
) -> None:
    text = "A sentence that takes its time, " * 8
    steps.reset([Slow(text, 3.0)])
    url = f"{agent.url}/v1/chat/completions"
    body = {"messages": ASKED, "tools": [BASH], "stream": True}
    began, told = time.monotonic(), []
    with agent.http.stream("POST", url, json=body) as response:
        for chunk in events(response):
            content = chunk["choices"][0]["delta"].get("content")
            told += [(time.monotonic() - began, content)] if content else []
    assert "".join(content for _, content in told) == text
    assert told[0][0] < told[-1][0] - 1.0
    check_samples(agent.samples(), [BEGUN.answer(text)], steps)


def test_streams_of_the_library_with_and_without_tools(
    client: Any, agent: Agent, steps: StepEngine
) -> None:
    steps.reset([step(1), "naïve ☃ text"])
    asked = {"model": "policy", "messages": ASKED, "stream": True}
    chunks = list(client.chat.completions.create(**asked, tools=[BASH]))
    calls = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or []]
    assert calls[0].function.name == "bash"
    chunks = list(client.chat.completions.create(**asked))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "naïve ☃ text"
    assert chunks[-1].choices[0].finish_reason == "stop"
    plain = Line().prompt(user("begin")).answer("naïve ☃ text")
    check_samples(agent.samples(), [BEGUN.answer(step(1)), plain], steps)


def test_an_engine_that_fails_is_an_error_in_a_stream_too(
    client: Any, agent: Agent, steps: StepEngine
) -> None:
    steps.reset([503, "fine"])
    with pytest.raises(openai.APIError) as caught:
        list(client.chat.completions.create(model="policy", messages=ASKED, stream=True))
    assert caught.value.code == "engine_failed"
    assert agent.samples()["samples"] == []
    client.chat.completions.create(model="policy", messages=ASKED, stream=True).close()


def test_models_and_unknown_fields(client: Any, agent: Agent, steps: StepEngine) -> None:
    (model,) = client.models.list().data
    assert model.id and model.object == "model"
    steps.reset(["yes"])
    answer = client.chat.completions.create(
        model=model.id,
        messages=[{**ASKED[0], "name": "x", "cache_control": {"type": "ephemeral"}}],
        user="me",
        metadata={"a": "b"},
        reasoning_effort="low",
        seed=1,
        logit_bias={"5": 1},
        presence_penalty=0.5,
        response_format={"type": "text"},
        service_tier="auto",
        extra_body={"top_k": 4, "chat_template_kwargs": {"a": 1}, "unheard_of": [1]},
        extra_query={"api-version": "1"},
        extra_headers={"X-Unknown": "1"},
    )
    assert answer.choices[0].message.content == "yes"
    assert "top_k" not in steps.calls[0].body["sampling_params"]
    check_samples(agent.samples(), [Line().prompt(user("begin")).answer("yes")], steps)


def test_a_request_with_a_key_that_is_sent_twice_is_one_turn(
    client: Any, agent: Agent, steps: StepEngine
) -> None:
    steps.reset(["one", "other"])
    same = {"extra_headers": {"Idempotency-Key": "abc"}}
    asked = {"model": "policy", "messages": ASKED}
    first = client.chat.completions.create(**asked, **same)
    again = client.chat.completions.create(**asked, **same)
    assert first.model_dump() == again.model_dump() and len(steps.calls) == 1
    check_samples(agent.samples(), [Line().prompt(user("begin")).answer("one")], steps)
    asked = {**asked, "stream": True, "extra_headers": {"Idempotency-Key": "abd"}}
    for _ in range(2):
        streamed = list(client.chat.completions.create(**asked))
        assert "".join(c.choices[0].delta.content or "" for c in streamed) == "other"
    assert len(steps.calls) == 2 and agent.samples()["model_calls"] == 1


def test_a_key_whose_first_request_is_still_running_waits_for_its_answer(
    client: Any, agent: Agent, steps: StepEngine
) -> None:
    steps.reset([Slow("one", 1.0), "other"])
    asked = {"model": "policy", "messages": ASKED, "extra_headers": {"Idempotency-Key": "k"}}
    found: list[str] = []

    def ask() -> None:
        answer = client.chat.completions.create(**asked)
        found.append(answer.choices[0].message.content)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
        until(lambda: steps.calls)
    for thread in threads:
        thread.join(20)
    assert found == ["one"] * 3 and len(steps.calls) == 1
    assert agent.samples()["model_calls"] == 1


def test_parallel_calls_run_at_once_and_are_both_kept(
    client: Any, agent: Agent, steps: StepEngine
) -> None:
    """Four sub-agents ask at once; two of them ask the very same."""
    steps.reset([Slow(f"answer {n}", 1.5) for n in range(4)])
    questions = ["a", "b", "same", "same"]

    def ask(question: str) -> None:
        client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": question}]
        )

    threads = [threading.Thread(target=ask, args=(question,)) for question in questions]
    for thread in threads:
        thread.start()
    until(lambda: len(steps.calls) == 4, 1.4)  # before the first is answered
    for thread in threads:
        thread.join(20)
    lines = [
        Line()
        .prompt(user(call.prompt.split("user\n")[1].split("<|im_end|>")[0]))
        .answer(f"answer {n}")
        for n, call in enumerate(steps.calls)
    ]
    check_samples(agent.samples(), lines, steps)


def test_a_reused_key_with_another_body_is_told(
    client: Any, agent: Agent, steps: StepEngine
) -> None:
    steps.reset(["one", "other"])
    same = {"extra_headers": {"Idempotency-Key": "abc"}}
    client.chat.completions.create(model="policy", messages=ASKED, **same)
    with pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": "else"}], **same
        )
    assert caught.value.status_code == 409 and caught.value.code == "idempotency_conflict"
    assert len(steps.calls) == 1
