"""terminus-2 against a scripted model: whole episodes, its limits, and what it does with errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("harbor")
from agent_scripted_model import ScriptedModel, error, text  # noqa: E402
from agent_server_helpers import Server, make_task  # noqa: E402

from miles_core.agent_server.agents.terminus_parser import AnyAnswerParser  # noqa: E402
from miles_core.agent_server.protocol import TrialResult  # noqa: E402
from miles_core.verdicts import Cause, VerdictKind  # noqa: E402

pytestmark = pytest.mark.agent_env

TERMINUS = "terminus-2"


def keys(*lines: str, done: bool = False) -> dict[str, Any]:
    """An answer that types lines into the terminal."""
    commands = [{"keystrokes": line + "\n", "duration": 0.15} for line in lines]
    return text(
        json.dumps({"analysis": "a", "plan": "p", "commands": commands, "task_complete": done})
    )


def cut(content: str) -> tuple[int, dict[str, Any]]:
    """An answer that reached the limit of its length."""
    choice = {"index": 0, "message": text(content), "finish_reason": "length"}
    return 200, {"choices": [choice], "usage": {"prompt_tokens": 10, "completion_tokens": 5}}


def run(server: Server, script: list[Any], **fields: Any) -> tuple[TrialResult, ScriptedModel]:
    model = ScriptedModel(script)
    try:
        return server.run(
            fields.pop("task", "answer"), TERMINUS, base_url=model.url, **fields
        ), model
    finally:
        model.close()


def roles(model: ScriptedModel) -> str:
    return "".join(message["role"][0] for message in model.requests[-1]["messages"])


def test_an_episode_of_four_turns(server: Server) -> None:
    result, model = run(
        server,
        [
            keys("echo 4 > a", "cat a"),
            keys("echo $(cat a)2 > /app/answer.txt"),
            *[keys(done=True)] * 2,
        ],
        sampling_params={"temperature": 0.7, "top_p": 0.9, "max_tokens": 99},
    )
    assert result.verdict.kind is VerdictKind.GRADED, result.verdict
    assert result.reward == 1.0 and result.verdict.cause is None
    metrics = result.agent_metrics
    assert (metrics.turns, metrics.tool_calls) == (4, 3)
    assert (metrics.n_input_tokens, metrics.n_output_tokens) == (40, 20)
    assert roles(model) == "uauauau"
    for body in model.requests:
        assert (body["temperature"], body["top_p"], body["max_tokens"]) == (0.7, 0.9, 99)
        assert body["model"] == "policy" and "stream" not in body
    shown = model.requests[1]["messages"][-1]["content"]
    assert "cat a" in shown and "New Terminal Output" in shown
    for earlier, later in zip(model.requests, model.requests[1:], strict=False):
        known = earlier["messages"]
        assert later["messages"][: len(known)] == known, "the conversation only grows"


def test_a_turn_limit_lets_the_last_turn_act(server: Server) -> None:
    result, model = run(
        server, [keys("ls"), keys("echo 42 > /app/answer.txt"), keys("ls")], max_turns=2
    )
    assert (result.reward, result.verdict.cause) == (1.0, Cause.TURN_LIMIT)
    assert result.agent_metrics.turns == 2 == len(model.requests)


def test_a_token_budget_ends_before_the_next_call(server: Server) -> None:
    result, model = run(server, [keys("echo 42 > /app/answer.txt"), keys("ls")], max_seq_len=15)
    assert (result.reward, result.verdict.cause) == (1.0, Cause.TOKEN_BUDGET)
    assert len(model.requests) == 1


def test_an_answer_beyond_the_budget_is_not_used(server: Server) -> None:
    result, model = run(server, [keys("echo 42 > /app/answer.txt")], max_seq_len=14)
    assert (result.reward, result.verdict.cause) == (0.0, Cause.TOKEN_BUDGET)
    assert result.agent_metrics.turns == 1 == len(model.requests)


def test_a_cut_answer_ends_the_episode(server: Server) -> None:
    """Even one that reads like a whole answer: the rest of it is not known."""
    whole = keys("echo 42 > /app/answer.txt", done=True)["content"]
    result, model = run(server, [keys("echo 1 > b"), cut(whole), keys("ls")])
    assert result.verdict.kind is VerdictKind.GRADED
    assert (result.reward, result.verdict.cause) == (0.0, Cause.TOKEN_BUDGET)
    assert result.agent_metrics.turns == 2 == len(model.requests)
    assert result.exit_status == "SequenceLengthLimitExceeded"


@pytest.mark.parametrize(
    ("code", "cause"),
    [("context_length_exceeded", Cause.TOKEN_BUDGET), ("turn_limit", Cause.TURN_LIMIT)],
)
def test_what_a_session_refuses_is_the_policys_end(server: Server, code: str, cause: Cause) -> None:
    result, _ = run(server, [keys("echo 42 > /app/answer.txt"), error(400, code)])
    assert (result.reward, result.verdict.cause) == (1.0, cause)


@pytest.mark.parametrize(
    ("answer", "cause", "calls"),
    [
        (error(502, "engine_failed"), Cause.ENGINE_FAILED, 2),
        (error(404, "session_not_found"), Cause.SESSION_FAILED, 2),
        ((200, {"choices": []}), Cause.SESSION_FAILED, 2),
    ],
)
def test_a_failing_endpoint_gives_no_verdict(
    server: Server, answer: Any, cause: Cause, calls: int
) -> None:
    result, model = run(server, [keys("echo 42 > /app/answer.txt"), answer])
    assert result.verdict.kind is VerdictKind.NO_VERDICT and result.reward is None
    assert result.verdict.cause is cause
    assert len(model.requests) == calls


def test_a_busy_endpoint_is_asked_again(server: Server) -> None:
    result, model = run(
        server, [error(503, "busy"), keys("echo 42 > /app/answer.txt", done=True), keys(done=True)]
    )
    assert result.reward == 1.0, result.verdict
    assert (len(model.requests), result.agent_metrics.turns) == (3, 2)


def test_an_agent_that_gets_no_answer_gives_no_verdict(server: Server, tasks: Path) -> None:
    make_task(tasks, "short", agent_s=2.0)
    result, _ = run(server, [30.0, keys("ls")], task="short")
    assert result.verdict.kind is VerdictKind.NO_VERDICT
    assert result.verdict.cause is Cause.NO_MODEL_CALL


def test_answers_that_are_no_actions(server: Server) -> None:
    result, model = run(server, [text("I would list the files."), text("ls"), text("{}")])
    assert (result.reward, result.verdict.cause) == (0.0, Cause.MALFORMED_ACTIONS)
    assert "parsing errors" in model.requests[1]["messages"][-1]["content"]
    assert result.exit_status == "RepeatedFormatError"


@pytest.mark.parametrize(
    ("commands", "told"),
    [
        ([{"keystrokes": "\ud800"}], "half a surrogate pair"),
        ([{"keystrokes": "a\0b"}], "a NUL"),
        ([{"keystrokes": "ls", "duration": float("nan")}], "no number"),
        ("[" * 50_000, "cannot be read"),
        ("9" * 5_000, "cannot be read"),
    ],
    ids=["surrogate", "nul", "nan", "deep", "digits"],
)
def test_keys_that_nobody_can_type_are_the_policys_mistake(commands: Any, told: str) -> None:
    """They raise in Harbor's agent, and would end the trial without a verdict."""
    from harbor.agents.terminus_2.terminus_json_plain_parser import TerminusJSONPlainParser

    written = commands if isinstance(commands, str) else json.dumps(commands)
    parser = AnyAnswerParser(TerminusJSONPlainParser())
    result = parser.parse_response(f'{{"analysis": "a", "plan": "p", "commands": {written}}}')
    assert told in result.error and result.commands == []
    fine = parser.parse_response(keys("ls")["content"])
    assert (fine.error, len(fine.commands)) == ("", 1)


def test_an_answer_stays_as_it_came(server: Server) -> None:
    """With its tool calls, though they are no actions here: a session knows its answers again."""
    call = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
    strange = {"role": "assistant", "content": None, "tool_calls": [call]}
    result, model = run(server, [strange, keys(done=True)])
    assert result.verdict.kind is VerdictKind.GRADED
    assert model.requests[1]["messages"][1] == strange


def test_keys_that_end_the_terminal_are_the_policys_doing(server: Server) -> None:
    result, _ = run(server, [keys("echo 42 > /app/answer.txt"), keys("exit", "ls"), keys("ls")])
    assert (result.reward, result.verdict.cause) == (1.0, Cause.AGENT_CRASHED), result.verdict


def test_a_sandbox_without_tmux_says_so(server: Server, tasks: Path) -> None:
    make_task(
        tasks, "no-tmux", dockerfile="FROM debian:12\nRUN rm -f /usr/bin/tmux\nWORKDIR /app\n"
    )
    result, model = run(server, [keys("ls")], task="no-tmux")
    assert result.verdict.cause is Cause.AGENT_SETUP_FAILED
    assert "tmux" in result.verdict.detail and not model.requests


@pytest.mark.slow
def test_a_step_out_of_time_leaves_the_next_a_terminal(server: Server, tasks: Path) -> None:
    """The budget is of each conversation: the second step begins another one."""
    task = make_task(tasks, "two-steps")
    toml = (task / "task.toml").read_text()
    for name in ("one", "two"):
        toml += f"[[steps]]\nname = '{name}'\n[steps.agent]\ntimeout_sec = 3.0\n"
        for path in ("instruction.md", "tests/test.sh"):
            target = task / "steps" / name / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text((task / path).read_text())
    (task / "task.toml").write_text(toml)
    done = keys("echo 42 > /app/answer.txt", done=True)
    wait = {"keystrokes": "sleep 50\n", "duration": 40}
    long = text(json.dumps({"analysis": "a", "plan": "p", "commands": [wait]}))
    result, model = run(server, [long, done, keys(done=True)], task="two-steps", max_seq_len=100)
    assert (result.reward, result.verdict.cause) == (0.5, Cause.AGENT_TIMEOUT), result.verdict
    assert roles(model) == "uau"
