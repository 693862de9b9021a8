"""A model endpoint that fails after its first answer: no agent is graded for that."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("harbor")
from agent_scripted_model import DONE, Raw, ScriptedModel, bash, error, text  # noqa: E402
from agent_server_helpers import Server, assert_no_verdict, make_task  # noqa: E402
from harbor.models.agent.context import AgentContext  # noqa: E402

from miles_core.agent_server.agents.job import JOBS, AgentFailed, AgentJob  # noqa: E402
from miles_core.agent_server.agents.mini import default_agent_config  # noqa: E402
from miles_core.agent_server.agents.mini_outside import MiniSweAgentOutside  # noqa: E402
from miles_core.agent_server.inside.endpoint import NoCompletion, completion  # noqa: E402
from miles_core.agent_server.protocol import TrialRequest  # noqa: E402
from miles_core.agent_server.runner import quiet_libraries  # noqa: E402
from miles_core.verdicts import Cause, VerdictKind  # noqa: E402

pytestmark = pytest.mark.agent_env

MINI, TERMINUS, OUTSIDE = "mini-swe-agent", "terminus-2", "mini-swe-agent, outside"
OK = "HTTP/1.1 200 OK\ncontent-type: application/json"
HTML = b"<html><body>502 Bad Gateway</body></html>"


def typed(line: str, seconds: float = 0.1) -> dict[str, Any]:
    """An answer that types a line into the terminal of terminus-2."""
    commands = [{"keystrokes": line + "\n", "duration": seconds}]
    return text(json.dumps({"analysis": "a", "plan": "p", "commands": commands}))


FIRST = {MINI: bash("true"), OUTSIDE: bash("true"), TERMINUS: typed("true")}


def whole(**fields: Any) -> dict[str, Any]:
    """A completion, with `fields` of its message."""
    message = {"role": "assistant", "content": "text", **fields}
    return {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}


def sized(body: bytes, length: int | None = None, head: str = OK) -> Raw:
    return Raw(f"{head}\ncontent-length: {len(body) if length is None else length}", body)


FINE = json.dumps(whole()).encode()
MISSHAPEN: dict[str, tuple[Any, str]] = {
    "null": (None, "the answer is no object but null"),
    "a list": ([], "the answer is no object but list"),
    "no choices": ({}, "has no choices"),
    "empty choices": ({"choices": []}, "has no choices"),
    "choices of null": ({"choices": [None]}, r"choices\[0\] is no object"),
    "no message": ({"choices": [{}]}, "message is no object but null"),
    "a number": (whole(content=12), "message.content is no text but int 12"),
    "parts": (whole(content=[{"type": "text"}]), "message.content is no text but list"),
    "a call": (whole(tool_calls={"id": "c"}), "message.tool_calls is no list but dict"),
    "calls of text": (whole(tool_calls=["ls"]), r"tool_calls\[0\] is no object"),
    "no function": (whole(tool_calls=[{"id": "c"}]), r"tool_calls\[0\].function is no object"),
    "arguments": (
        whole(tool_calls=[{"function": {"name": "bash", "arguments": {"command": "ls"}}}]),
        r"tool_calls\[0\].function.arguments is no text but dict",
    ),
    "a role": (whole(role="exit"), "message.role is 'exit'"),
    "usage": ({**whole(), "usage": {"prompt_tokens": "x"}}, "usage.prompt_tokens is no count"),
    "an error": ({"error": {"code": "odd", "message": "no luck"}}, "HTTP 200 odd: no luck"),
    "an engine's error": ({"error": {"code": "engine_failed", "message": "m"}}, "engine_failed"),
}
WIRE: dict[str, tuple[Raw, str]] = {
    "HTML": (sized(HTML, head="HTTP/1.1 200 OK\ncontent-type: text/html"), "not JSON"),
    "nothing": (sized(b""), "not JSON"),
    "half a JSON": (sized(FINE[:40]), "not JSON"),
    "deep": (sized(b"[" * 100_000), "not JSON"),
    "compressed": (sized(gzip.compress(FINE), head=OK + "\ncontent-encoding: gzip"), "not JSON"),
    "300 MB": (
        Raw(OK + f"\ncontent-length: {300 << 20}", b"x" * (1 << 20), 300),
        "more than 16 MiB",
    ),
    "300 MB without a length": (Raw(OK, b"x" * (1 << 20), 300), "more than 16 MiB"),
    "breaks off": (sized(FINE[:40], 400), "4 attempts"),
    "breaks off in chunks": (Raw(OK + "\ntransfer-encoding: chunked", b"ff\r\n{}"), "4 attempts"),
    "no HTTP": (Raw("hello"), "4 attempts"),
    "an error breaks off": (
        Raw("HTTP/1.1 500 Oh\ntransfer-encoding: chunked", b"ff\r\n{}"),
        "4 attempts",
    ),
}
QUICK = {(MINI, "a number"), (MINI, "300 MB"), (TERMINUS, "300 MB without a length")}
FAULTS = {**{name: ((200, body), said) for name, (body, said) in MISSHAPEN.items()}, **WIRE}
CASES = [
    pytest.param(agent, name, marks=[] if (agent, name) in QUICK else pytest.mark.slow)
    for agent in (MINI, TERMINUS, OUTSIDE)
    for name in FAULTS
]


class Shell:
    """What stands for a sandbox of another kind: every command prints nothing."""

    async def exec(self, *args: Any, **kwargs: Any) -> SimpleNamespace:
        return SimpleNamespace(stdout="", stderr="", return_code=0)


async def work_outside(script: list[Any], logs: Path, limit_s: float) -> AgentJob:
    """mini-swe-agent on this host against a script, for at most `limit_s` seconds."""
    quiet_libraries(logs)
    model = ScriptedModel(script)
    request = TrialRequest(instance_id="t", agent_name=MINI, base_url=model.url)
    job = JOBS["of-a-test"] = AgentJob(request, default_agent_config())
    try:
        agent = MiniSweAgentOutside(logs, trial_id="of-a-test")
        async with asyncio.timeout(limit_s):
            await agent.run("do", Shell(), AgentContext())  # type: ignore
    except (AgentFailed, TimeoutError):
        pass
    finally:
        JOBS.pop("of-a-test")
        await asyncio.to_thread(model.close)
    return job


@pytest.mark.parametrize("name", sorted(MISSHAPEN))
def test_an_answer_that_is_no_completion_is_told_from_one(name: str) -> None:
    body, said = MISSHAPEN[name]
    with pytest.raises(NoCompletion, match=said):
        completion(json.dumps(body).encode())
    answer, choice, message = completion(FINE)
    assert (choice, message) == (answer["choices"][0], choice["message"])


@pytest.mark.parametrize(("agent", "name"), CASES)
def test_a_fault_after_an_answer_is_no_grade(
    server: Server, tmp_path: Path, agent: str, name: str
) -> None:
    fault, said = FAULTS[name]
    cause = Cause.ENGINE_FAILED if said == "engine_failed" else Cause.SESSION_FAILED
    if agent == OUTSIDE:
        job = asyncio.run(work_outside([FIRST[agent], fault], tmp_path, 60.0))
        assert job.turns == 1 and job.failure is not None
        assert job.failure.cause is cause and re.search(said, str(job.failure)), job.failure
        return
    model = ScriptedModel([FIRST[agent], fault])
    try:
        result = server.run("answer", agent, base_url=model.url)
    finally:
        model.close()
    assert_no_verdict(result, cause, said)
    assert result.agent_metrics.turns == 1


LAST = {
    MINI: bash(DONE),
    TERMINUS: text(json.dumps({"analysis": "", "plan": "", "commands": [], "task_complete": True})),
}


@pytest.mark.parametrize("agent", [MINI, TERMINUS])
def test_a_call_whose_answer_was_lost_comes_again_by_the_same_name(
    server: Server, agent: str
) -> None:
    model = ScriptedModel([FIRST[agent], sized(FINE[:40], 400), LAST[agent]])
    try:
        result = server.run("answer", agent, base_url=model.url)
    finally:
        model.close()
    assert result.verdict.kind is VerdictKind.GRADED, result.verdict
    first, lost, again, *_ = model.keys
    assert None is not first != lost == again and model.requests[1] == model.requests[2]


def run_late(server: Server, agent: str, script: list[Any]) -> Any:
    """A trial of an agent that has 6 seconds."""
    make_task(server.tasks, "late-answer", agent_s=6.0)
    model = ScriptedModel(script)
    try:
        return server.run("late-answer", agent, base_url=model.url)
    finally:
        model.close()


@pytest.mark.parametrize("agent", [MINI, TERMINUS])
def test_a_model_that_hangs_is_no_grade(server: Server, agent: str) -> None:
    result = run_late(server, agent, [FIRST[agent], 12.0, FIRST[agent]])
    words = "the last model call was open for [3-6] s of the agent's 6 s"
    assert_no_verdict(result, Cause.SESSION_FAILED, words)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("agent", "first", "reward"),
    [
        (MINI, bash("sleep 4"), 0.0),
        (TERMINUS, typed("true", 4.0), 0.0),
        (MINI, bash("echo 42 > /app/answer.txt"), 1.0),
    ],
    ids=["mini", "terminus", "full-reward"],
)
def test_what_stays_a_grade(
    server: Server, agent: str, first: dict[str, Any], reward: float
) -> None:
    """A call that took less than half of the time, and a full reward."""
    result = run_late(server, agent, [first, 12.0, first])
    assert result.verdict.kind is VerdictKind.GRADED, result.verdict
    assert (result.reward, result.verdict.cause) == (reward, Cause.AGENT_TIMEOUT)


@pytest.mark.slow
def test_an_agent_that_stops_its_own_program_hides_nothing(server: Server) -> None:
    """The answer comes in time, and nobody takes it."""
    stop = bash("p=$PPID; (sleep 0.5; kill -STOP $p) > /dev/null 2>&1 &")
    result = run_late(server, MINI, [stop, 1.0, bash(DONE)])
    assert result.verdict.kind is VerdictKind.GRADED, result.verdict
    assert (result.reward, result.verdict.cause) == (0.0, Cause.AGENT_TIMEOUT)


def test_outside_a_hanging_model_is_known_too(tmp_path: Path) -> None:
    job = asyncio.run(work_outside([FIRST[OUTSIDE], 12.0, bash(DONE)], tmp_path, 6.0))
    assert job.turns == 1
    assert job.outage is not None and "of the agent's 6 s" in job.outage


@pytest.mark.parametrize("command", [5, ["ls"], "a\0b", "\ud800"])
def test_outside_a_command_that_is_none_is_answered(tmp_path: Path, command: Any) -> None:
    call = bash("")
    call["tool_calls"][0]["function"]["arguments"] = json.dumps({"command": command})
    last: list[dict[str, Any]] = []

    def end(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        last.append(body["messages"][-1])
        return error(400, "turn_limit")

    job = asyncio.run(work_outside([call, end], tmp_path, 60.0))
    assert (job.turns, job.failure, job.cause) == (1, None, Cause.TURN_LIMIT)
    assert "error occurred" in last[0]["content"], last
