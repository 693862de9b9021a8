"""Requests as agents send them: twice, with their own stops, with wishes that nobody can fulfil."""

from __future__ import annotations

import contextlib
import json
import socket
import threading

import httpx
import pytest
from session_helpers import BASH, Agent, ScriptedEngine, until
from test_session_server import CALL, DONE, OBSERVED, USER, check_exact

from miles_core.sessions.families import ChatFamily


def post(agent: Agent, key: str, **fields: object) -> httpx.Response:
    body = {"messages": [USER], "tools": [BASH], **fields}
    url = f"{agent.url}/v1/chat/completions"
    return agent.http.post(url, json=body, headers={"Idempotency-Key": key})


def test_a_key_stands_for_one_request(
    server_url: str, http: httpx.Client, engine: ScriptedEngine, family: ChatFamily
) -> None:
    agent = Agent(server_url, http)
    engine.script = [500, family.render_output(CALL), family.render_output(DONE)]
    assert post(agent, "a").status_code == 502
    first = post(agent, "a")
    assert first.headers["x-request-id"] in first.json()["id"]
    assert post(agent, "a").json() == first.json(), "a failed one is tried, an answered one told"
    conflict = post(agent, "a", temperature=0.5)
    assert conflict.status_code == 409
    assert conflict.json()["error"]["code"] == "idempotency_conflict"
    post(agent, "b")
    samples = agent.samples()
    check_exact(samples, engine)
    assert samples["model_calls"] == 1 and samples["retries"] == 1


def test_a_request_that_comes_again_while_it_runs_joins(
    server_url: str, http: httpx.Client, engine: ScriptedEngine, family: ChatFamily
) -> None:
    agent = Agent(server_url, http)
    engine.script, engine.delay_s = [family.render_output(CALL)], 1.5
    before = len(engine.requests)
    answers: list[httpx.Response] = []

    def ask() -> None:
        answers.append(post(agent, "k"))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    until(lambda: len(engine.requests) > before)
    # One that goes away takes nothing from the others.
    try:
        url = f"{agent.url}/v1/chat/completions"
        body = {"messages": [USER], "tools": [BASH]}
        httpx.post(url, json=body, headers={"Idempotency-Key": "k"}, timeout=0.3)
    except httpx.ReadTimeout:
        pass
    for thread in threads:
        thread.join(20)
    engine.delay_s = 0.02
    assert len(engine.requests) == before + 1
    assert [a.json() for a in answers] == [answers[0].json()] * 3
    assert agent.samples()["model_calls"] == 1


def test_a_clients_own_stop_cuts_the_text_and_not_the_ids(
    server_url: str, http: httpx.Client, engine: ScriptedEngine, family: ChatFamily
) -> None:
    agent = Agent(server_url, http)
    text = "Thought: look\nObservation:"
    engine.script = [family.tokenizer.encode(text), family.render_output(DONE)]
    answer = agent.message([USER], stop=["\nObservation:", "never"])
    assert answer["content"] == "Thought: look"
    assert engine.requests[-1]["sampling_params"]["stop"] == ["\nObservation:", "never"]
    agent.message([USER, answer, {"role": "user", "content": "Observation: a"}])
    samples = agent.samples()
    check_exact(samples, engine)
    (sample,) = samples["samples"]
    assert len(sample["turns"]) == 2 and text in family.tokenizer.decode(sample["tokens"])


def test_what_no_session_can_do_is_told(
    server_url: str, http: httpx.Client, engine: ScriptedEngine, family: ChatFamily
) -> None:
    agent = Agent(server_url, http)
    engine.script = [family.render_output(DONE)]
    fields = {"seed": 7, "tool_choice": "required", "user": "me", "logit_bias": None, "new": [1]}
    agent.message([USER], tools=[BASH], **fields)
    assert agent.samples()["ignored_fields"] == ["new", "seed", "tool_choice"]


def test_log_probabilities_are_told_when_asked_for(
    server_url: str, http: httpx.Client, engine: ScriptedEngine, family: ChatFamily
) -> None:
    agent = Agent(server_url, http)
    ids = family.render_output({**DONE, "content": "☃ done"})
    engine.script = [ids]
    choice = agent.ask([USER], logprobs=True).json()["choices"][0]
    listed = choice["logprobs"]["content"]
    assert [entry["logprob"] for entry in listed] == engine.sent[engine.requests[-1]["rid"]][1]
    assert len(listed) == len(ids) and listed[-1]["token"] == "<|im_end|>"


def test_another_tool_list_is_seen(
    server_url: str, http: httpx.Client, engine: ScriptedEngine, family: ChatFamily
) -> None:
    agent = Agent(server_url, http)
    engine.script = [family.render_output(m) for m in (CALL, DONE, DONE)]
    first = agent.message([USER], tools=[BASH])
    more = [BASH, {"type": "function", "function": {"name": "edit", "parameters": {}}}]
    agent.message([USER, first, OBSERVED], tools=more)
    agent.message([USER, first, OBSERVED], tools=[json.loads(json.dumps(BASH, sort_keys=True))])
    samples = agent.samples()
    check_exact(samples, engine)
    assert samples["tool_lists"] == 2
    assert [len(s["turns"]) for s in samples["samples"]] == [1, 2]
    assert "edit" in family.tokenizer.decode(samples["samples"][0]["tokens"])


def test_half_characters_of_a_client_are_read(
    server_url: str, http: httpx.Client, engine: ScriptedEngine, family: ChatFamily
) -> None:
    agent = Agent(server_url, http)
    engine.script = [family.render_output(DONE)]
    body = json.dumps({"messages": [{"role": "user", "content": "a\ud800b"}]})
    response = http.post(f"{agent.url}/v1/chat/completions", content=body)
    assert response.status_code == 200, response.text
    assert "a\ufffdb" in family.tokenizer.decode(engine.requests[-1]["input_ids"])


def test_what_cannot_fit_is_refused_before_it_is_tokenised_whole(
    server_url: str, http: httpx.Client, engine: ScriptedEngine, family: ChatFamily
) -> None:
    agent = Agent(server_url, http, max_seq_len=200_000)
    engine.script = [family.render_output(CALL), family.render_output(DONE)]
    first = agent.message([USER], tools=[BASH])
    huge = {"role": "tool", "content": "all work and no play ☃ " * 200_000}
    refused = agent.ask([USER, first, huge], tools=[BASH])
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert "more than" in refused.json()["error"]["message"]
    assert agent.samples()["end_reason"] == "token_budget"
    # What fits is taken whole, long as it is.
    long = {"role": "tool", "content": "☃ work " * 20_000 + "<|im_start|>" * 3}
    assert agent.ask([USER, first, long], tools=[BASH]).status_code == 200
    samples = agent.samples()
    check_exact(samples, engine)
    (sample,) = samples["samples"]
    assert long["content"] in family.tokenizer.decode(sample["tokens"])


def test_a_request_has_its_bounds(server_url: str, http: httpx.Client) -> None:
    agent = Agent(server_url, http)
    many = agent.ask([USER] * 20_001)
    assert many.status_code == 400 and many.json()["error"]["param"] == "messages"
    tools = agent.ask([USER], tools=[{}] * 2_001)
    assert tools.status_code == 400 and tools.json()["error"]["param"] == "tools"
    body = b'{"messages": "' + b"x" * (16 * 2**20) + b'"}'
    large = http.post(f"{agent.url}/v1/chat/completions", content=body)
    assert large.status_code == 413 and large.json()["error"]["code"] == "request_too_large"
    refused = agent.ask([{"role": "bard"}], **{f"field{n}": 1 for n in range(100)})
    assert refused.status_code == 400
    assert len(agent.samples()["ignored_fields"]) <= 32


def test_a_head_has_its_bounds(server_url: str, http: httpx.Client, family: ChatFamily) -> None:
    agent = Agent(server_url, http)
    assert post(agent, "k" * 256).status_code == 400
    host, port = server_url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nx-long: ")
        with contextlib.suppress(ConnectionError):
            for _ in range(400):
                connection.sendall(b"a" * 4096)
        answer = b""
        with contextlib.suppress(ConnectionError):
            answer = connection.recv(4096)
    assert answer.startswith(b"HTTP/1.1 431") or answer == b""
    # Bodies are no heads, and a connection goes on after one.
    for _ in range(3):
        assert agent.ask([{"role": "bard", "content": "x" * 300_000}]).status_code == 400
    assert http.get(f"{server_url}/health").status_code == 200


@pytest.mark.parametrize(
    "fields", [{"max_tokens": 1.5}, {"stop": ["x" * 1001]}, {"stop": ["x"] * 17}, {"n": 1.5}]
)
def test_wishes_out_of_bounds(
    fields: dict[str, object], server_url: str, http: httpx.Client
) -> None:
    refused = Agent(server_url, http).ask([USER], **fields)
    assert refused.status_code == 400 and refused.json()["error"]["param"] in fields
