"""mini-swe-agent in the sandbox: its counts, and answers that were cut off."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("harbor")
from agent_scripted_model import DONE, ScriptedModel, bash, text  # noqa: E402
from agent_server_helpers import Server  # noqa: E402

from miles_core.verdicts import Cause, VerdictKind  # noqa: E402

pytestmark = pytest.mark.agent_env

MINI = "mini-swe-agent"


def test_turns_tool_calls_and_tokens_are_counted(server: Server) -> None:
    two = bash("echo 4 > a")
    two["tool_calls"] += bash("echo 42 > /app/answer.txt")["tool_calls"]
    model = ScriptedModel([two, text("no call"), bash(DONE)])
    try:
        result = server.run(
            "answer", MINI, base_url=model.url, sampling_params={"temperature": 0.5, "top_k": 7}
        )
    finally:
        model.close()
    metrics = result.agent_metrics
    assert (result.reward, result.verdict.cause) == (1.0, None), result.verdict
    assert (metrics.turns, metrics.tool_calls) == (3, 3)
    assert (metrics.n_input_tokens, metrics.n_output_tokens) == (30, 15)
    assert all((body["temperature"], body["top_k"]) == (0.5, 7) for body in model.requests)


def test_a_cut_answer_is_not_acted_on(server: Server) -> None:
    """Even one with a whole call: the agent is told, and the answer stays as the session has it."""
    whole = bash("echo 42 > /app/answer.txt")
    choice = {"index": 0, "message": whole, "finish_reason": "length"}
    cut = 200, {"choices": [choice], "usage": {"prompt_tokens": 10, "completion_tokens": 5}}
    model = ScriptedModel([cut, bash(DONE)])
    try:
        result = server.run("answer", MINI, base_url=model.url)
    finally:
        model.close()
    assert result.verdict.kind is VerdictKind.GRADED and result.reward == 0.0
    assert (result.agent_metrics.turns, result.agent_metrics.tool_calls) == (2, 1)
    again = model.requests[1]["messages"]
    assert [message["role"] for message in again[-2:]] == ["assistant", "user"]
    assert json.dumps(again[-2]["tool_calls"]) == json.dumps(whole["tool_calls"])


def test_answers_cut_off_again_and_again_end_the_agent(server: Server) -> None:
    choice = {"index": 0, "message": text("so long"), "finish_reason": "length"}
    model = ScriptedModel([(200, {"choices": [choice], "usage": {}})])
    try:
        result = server.run("answer", MINI, base_url=model.url)
    finally:
        model.close()
    assert (result.reward, result.verdict.cause) == (0.0, Cause.MALFORMED_ACTIONS)
    assert result.agent_metrics.turns == 3 == len(model.requests)
