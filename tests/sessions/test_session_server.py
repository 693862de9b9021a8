"""The session server as a process, over a scripted engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from session_helpers import (
    BASH,
    TOKEN,
    Agent,
    ScriptedEngine,
    server_command,
    until,
)

from miles_core.serving import EXIT_BUSY
from miles_core.sessions.client import SessionClient
from miles_core.sessions.families import ChatFamily

USER = {"role": "user", "content": "list the files"}
CALL = {
    "role": "assistant",
    "content": "Let me look.",
    "tool_calls": [{"function": {"name": "bash", "arguments": '{"command": "ls -a", "n": 1}'}}],
}
OBSERVED = {"role": "tool", "content": "a.txt\nnaïve ☃"}
DONE = {"role": "assistant", "content": "done"}


def check_exact(samples: dict[str, Any], engine: ScriptedEngine) -> None:
    """Every trained token is the engine's, after the very prompt that the engine was sent."""
    prompts = {request["rid"]: request["input_ids"] for request in engine.requests}
    seen = set()
    for sample in samples["samples"]:
        mask = [0] * len(sample["tokens"])
        for turn in sample["turns"]:
            assert turn["rid"] not in seen
            seen.add(turn["rid"])
            ids, logprobs = engine.sent[turn["rid"]]
            span = slice(turn["start"], turn["end"])
            assert sample["tokens"][span] == ids
            assert sample["logprobs"][span] == logprobs
            assert sample["tokens"][: turn["start"]] == prompts[turn["rid"]]
            mask[span] = [1] * len(ids)
        assert sample["loss_mask"] == mask
        assert all(p == 0.0 for p, m in zip(sample["logprobs"], mask, strict=True) if not m)
    assert len(seen) == samples["model_calls"]


def test_tool_conversation_is_the_templates_own_rendering(
    server_url: str, http: httpx.Client, engine: ScriptedEngine, family: ChatFamily
) -> None:
    agent = Agent(server_url, http)
    engine.script = [family.render_output(CALL), family.render_output(DONE)]
    answer = agent.message([USER], tools=[BASH])
    assert json.loads(answer["tool_calls"][0]["function"]["arguments"]) == {
        "command": "ls -a",
        "n": 1,
    }
    agent.message([USER, answer, OBSERVED], tools=[BASH])
    samples = agent.samples()
    check_exact(samples, engine)
    (sample,) = samples["samples"]
    whole = family.render_text([USER, CALL, OBSERVED, DONE], [BASH], False)
    assert sample["tokens"] == family.tokenizer.encode(whole.removesuffix("\n"))
    assert [turn["weight_version"] for turn in sample["turns"]] == [3, 3]
    assert engine.keys[-1] == engine.keys[-2] and agent.id not in str(engine.keys)


@pytest.mark.parametrize(
    "change",
    [
        {"content": "Let me look.  \n"},
        {"reasoning_content": None, "function_call": None, "provider_specific_fields": {}},
        {
            "tool_calls": [
                {
                    "id": "other",
                    "index": 0,
                    "type": "function",
                    "function": {"name": "bash", "arguments": '{"n":1,\n"command":"ls -a"}'},
                }
            ]
        },
        {"content": [{"type": "text", "text": "Let me look."}]},
    ],
)
def test_a_client_that_respells_an_answer_continues_it(
    change: dict[str, Any],
    server_url: str,
    http: httpx.Client,
    engine: ScriptedEngine,
    family: ChatFamily,
) -> None:
    agent = Agent(server_url, http)
    thinking = {**CALL, "reasoning_content": "hm"}
    engine.script = [family.render_output(thinking), family.render_output(DONE)]
    answer = agent.message([USER], tools=[BASH])
    assert answer["reasoning_content"] == "hm"
    agent.message([USER, {**answer, **change}, OBSERVED], tools=[BASH])
    samples = agent.samples()
    check_exact(samples, engine)
    assert [len(s["turns"]) for s in samples["samples"]] == [2]


def test_another_history_is_a_branch_and_nothing_is_trained_twice(
    server_url: str, http: httpx.Client, engine: ScriptedEngine, family: ChatFamily
) -> None:
    agent = Agent(server_url, http)
    engine.script = [family.render_output(m) for m in (CALL, DONE, DONE, DONE)]
    first = agent.message([USER], tools=[BASH])
    agent.message([USER, first, OBSERVED], tools=[BASH])
    agent.message([USER, first, {"role": "user", "content": "no"}], tools=[BASH])
    changed = {**first, "content": "I never said this"}
    agent.message([USER, changed, OBSERVED], tools=[BASH])
    samples = agent.samples()
    check_exact(samples, engine)
    assert [len(s["turns"]) for s in samples["samples"]] == [2, 1, 1]
    assert samples["model_calls"] == 4


def test_a_retry_replaces_the_answer_that_nobody_used(
    server_url: str, http: httpx.Client, engine: ScriptedEngine, family: ChatFamily
) -> None:
    agent = Agent(server_url, http, max_turns=2)
    engine.script = [family.render_output(m) for m in (DONE, CALL, DONE)]
    agent.message([USER], tools=[BASH])
    used = agent.message([USER], tools=[BASH])
    agent.message([USER, used, OBSERVED], tools=[BASH])
    samples = agent.samples()
    check_exact(samples, engine)
    assert [len(s["turns"]) for s in samples["samples"]] == [2]
    assert samples["model_calls"] == 2
    refused = agent.ask([USER, used, OBSERVED, DONE, USER], tools=[BASH])
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "turn_limit"
    assert agent.samples()["end_reason"] == "turn_limit"


def test_a_cut_off_answer_gets_its_end_untrained(
    server_url: str, http: httpx.Client, engine: ScriptedEngine, family: ChatFamily
) -> None:
    agent = Agent(server_url, http, sampling_params={"max_tokens": 4, "temperature": 0.5})
    full = family.render_output(CALL)
    engine.script = [full, family.render_output(DONE)]
    response = agent.ask([USER], max_tokens=50, temperature=2.0, top_k=1, unknown={"a": 1})
    assert response.json()["choices"][0]["finish_reason"] == "length"
    sent = engine.requests[-1]["sampling_params"]
    assert (sent["max_new_tokens"], sent["temperature"]) == (4, 0.5) and "top_k" not in sent
    answer = response.json()["choices"][0]["message"]
    agent.message([USER, answer, {"role": "user", "content": "go on"}])
    samples = agent.samples()
    check_exact(samples, engine)
    (sample,) = samples["samples"]
    end = sample["turns"][0]["end"]
    assert sample["tokens"][end] == family.end_of_turn_id and sample["loss_mask"][end] == 0
    text = family.tokenizer.decode(sample["tokens"][end:])
    assert text.startswith("<|im_end|>\n<|im_start|>user\ngo on")


def test_the_budget_holds_and_a_full_context_is_refused(
    server_url: str, http: httpx.Client, engine: ScriptedEngine, family: ChatFamily
) -> None:
    prompt = family.render_prompt([USER])
    agent = Agent(server_url, http, max_seq_len=len(prompt) + 5)
    engine.script = [family.tokenizer.encode("abcdefghij" * 3)]
    response = agent.ask([USER])
    assert engine.requests[-1]["sampling_params"]["max_new_tokens"] == 5
    answer = response.json()["choices"][0]["message"]
    assert response.json()["usage"]["total_tokens"] == len(prompt) + 5
    refused = agent.ask([USER, answer, USER])
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    samples = agent.samples()
    assert samples["end_reason"] == "token_budget"
    assert len(samples["samples"][0]["tokens"]) == len(prompt) + 5


@pytest.mark.parametrize(
    "broken",
    [
        500,
        503,
        {"text": "x"},
        {
            "meta_info": {
                "finish_reason": {"type": "abort"},
                "output_token_logprobs": [[-1, 5, None]],
            }
        },
        {"meta_info": {"finish_reason": {"type": "stop"}, "weight_version": "1"}},
        {
            "output_ids": [6],
            "meta_info": {
                "finish_reason": {"type": "stop"},
                "weight_version": "1",
                "output_token_logprobs": [[-1.0, 5, None]],
            },
        },
    ],
)
def test_engine_failures_are_named_and_never_recorded(
    broken: Any, server_url: str, http: httpx.Client, engine: ScriptedEngine, family: ChatFamily
) -> None:
    agent = Agent(server_url, http)
    engine.script = [broken, family.render_output(DONE)]
    response = agent.ask([USER])
    assert response.status_code in (502, 503)
    assert response.json()["error"]["code"] == "engine_failed"
    samples = agent.samples()
    assert samples["end_reason"] == "engine_failed" and samples["samples"] == []
    agent.message([USER])
    assert agent.samples()["end_reason"] is None
    check_exact(agent.samples(), engine)


def test_malformed_call_is_text_and_keeps_its_ids(
    server_url: str, http: httpx.Client, engine: ScriptedEngine, family: ChatFamily
) -> None:
    agent = Agent(server_url, http)
    text = '<tool_call>\n{"name": "bash", "arguments": {"command": "\n</tool_call>'
    engine.script = [[*family.tokenizer.encode(text), family.end_of_turn_id]]
    answer = agent.message([USER], tools=[BASH])
    assert answer["content"] == text and "tool_calls" not in answer
    check_exact(agent.samples(), engine)


def test_control_routes_need_the_token(server_url: str, http: httpx.Client) -> None:
    agent = Agent(server_url, http)
    assert len(agent.id) == 32 and int(agent.id, 16) >= 0
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        created = http.post(f"{server_url}/sessions", json={"max_seq_len": 9}, headers=headers)
        read = http.get(f"{agent.url}/samples", headers=headers)
        dropped = http.delete(agent.url, headers=headers)
        assert [created.status_code, read.status_code, dropped.status_code] == [401, 401, 401]
    assert http.get(f"{agent.url}/v1/models").json()["data"][0]["max_model_len"] == 4000
    unknown = http.post(f"{server_url}/sessions/{'0' * 32}/v1/chat/completions", json={})
    assert unknown.status_code == 404
    assert agent.delete() == 204 and agent.delete() == 404


@pytest.mark.parametrize(
    "fields",
    [{"messages": []}, {"messages": "x"}, {"n": 2}, {"messages": [{"role": "bard"}]},
     {"tools": "bash"}, {"max_tokens": 0}, {"stop": ["x", 1]}, {"top_p": 1.5}, {"stop": [""]}],
)  # fmt: skip
def test_bad_requests_have_openais_shape(
    fields: dict[str, Any], server_url: str, http: httpx.Client
) -> None:
    agent = Agent(server_url, http)
    body = {"messages": [USER], **fields}
    response = http.post(f"{agent.url}/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_health_answers_and_delete_aborts_while_a_generation_hangs(
    server_url: str, http: httpx.Client, engine: ScriptedEngine
) -> None:
    agent = Agent(server_url, http)
    engine.script = ["hang"]
    before = len(engine.requests)
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(agent.ask([USER])))
    thread.start()
    until(lambda: len(engine.requests) > before)
    assert http.get(f"{server_url}/health").json()["status"] == "ok"
    assert agent.delete() == 204
    thread.join(20)
    assert answers[0].status_code == 404
    until(lambda: engine.requests[-1]["rid"] in engine.aborted)


def test_a_client_that_goes_away_aborts_its_generation(
    server_url: str, http: httpx.Client, engine: ScriptedEngine, family: ChatFamily
) -> None:
    agent = Agent(server_url, http)
    engine.script = ["hang", family.render_output(DONE)]
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{agent.url}/v1/chat/completions", json={"messages": [USER]}, timeout=1.0)
    until(lambda: engine.requests[-1]["rid"] in engine.aborted)
    agent.message([USER])
    assert agent.samples()["model_calls"] == 1


def test_calls_of_one_session_run_beside_each_other(
    server_url: str, http: httpx.Client, engine: ScriptedEngine, family: ChatFamily
) -> None:
    agent = Agent(server_url, http)
    engine.script = [family.render_output(DONE) for _ in range(4)]
    engine.together, engine.most_in_flight = 4, 0
    # The same question, asked twice at once, has two answers that count; a later one is a retry.
    asked = [{"role": "user", "content": f"question {i // 2}"} for i in range(4)]
    threads = [threading.Thread(target=agent.ask, args=([q],)) for q in asked]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    engine.together = 0
    assert engine.most_in_flight == 4
    samples = agent.samples()
    check_exact(samples, engine)
    assert len(samples["samples"]) == 4 and samples["retries"] == 0
    engine.script = [family.render_output(DONE)]
    agent.message([asked[0]])
    samples = agent.samples()
    check_exact(samples, engine)
    assert len(samples["samples"]) == 3 and samples["retries"] == 2


async def test_client(server_url: str, engine: ScriptedEngine, family: ChatFamily) -> None:
    client = SessionClient([server_url], TOKEN, external_host="localhost")
    handle = await client.create(1000, 3, {"temperature": 1.0})
    assert handle.base_url.startswith("http://localhost:")
    engine.script = [family.render_output(DONE)]
    async with httpx.AsyncClient() as agent:
        url = handle.base_url.replace("localhost", "127.0.0.1")
        body = {"messages": [USER]}
        (await agent.post(f"{url}/chat/completions", json=body)).raise_for_status()
    recorded = await client.samples(handle)
    assert recorded.model_calls == 1 and sum(recorded.samples[0].loss_mask) > 0
    await client.delete(handle)
    await client.delete(handle)
    with pytest.raises(httpx.HTTPStatusError):
        await client.samples(handle)
    await client.aclose()


def test_a_port_in_use_is_told_from_other_errors(server_url: str, tokenizer_dir: Path) -> None:
    port = server_url.rpartition(":")[2]
    command = server_command(tokenizer_dir, "http://127.0.0.1:9", "--port", port)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == EXIT_BUSY and port in done.stderr and "--port" in done.stderr


def test_it_ends_with_its_parent_and_refuses_exposure(tokenizer_dir: Path, tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ready = tmp_path / "ready.json"
    more = ["--ready-file", str(ready), "--parent-pid", str(parent.pid)]
    child = subprocess.Popen(server_command(tokenizer_dir, "http://127.0.0.1:9", *more))
    try:
        until(ready.exists)
        assert json.loads(ready.read_text())["pid"] == child.pid
        parent.kill()
        parent.wait()
        assert child.wait(20) == 0
    finally:
        child.kill()
    env = {k: v for k, v in os.environ.items() if k != "MILES_SESSION_TOKEN"}
    command = server_command(tokenizer_dir, "http://127.0.0.1:9", "--host", "0.0.0.0")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode == 2 and "MILES_SESSION_TOKEN" in done.stderr
