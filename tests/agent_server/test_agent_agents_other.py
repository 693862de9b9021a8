"""Agents that are not ours: by import path, by a name of Harbor's, and names that nobody has."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("harbor")
from agent_scripted_model import ScriptedModel, text  # noqa: E402
from agent_server_helpers import Server, assert_no_verdict, make_task  # noqa: E402

from miles_core.agent_server.protocol import TrialResult  # noqa: E402
from miles_core.verdicts import Cause  # noqa: E402

pytestmark = pytest.mark.agent_env


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that can import `agent_classes`."""
    root = tmp_path_factory.mktemp("own-agents")
    make_task(root / "tasks", "answer")
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    try:
        made = Server(root, root / "tasks", "--max-concurrent", "2")
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    yield made
    made.stop()


def run(server: Server, agent: str) -> tuple[TrialResult, ScriptedModel]:
    model = ScriptedModel([text("echo 42 > /app/answer.txt")])
    try:
        return server.run("answer", agent, base_url=model.url), model
    finally:
        model.close()


def test_a_class_of_ones_own(own: Server) -> None:
    result, model = run(own, "agent_classes:Plain")
    assert result.reward == 1.0 and result.verdict.cause is None, result.verdict
    metrics = result.agent_metrics
    assert (metrics.turns, metrics.n_input_tokens, metrics.n_output_tokens) == (None, 10, 5)
    assert model.requests[0]["messages"][0]["content"] == "Write 42 into /app/answer.txt\n"


def test_a_class_that_stops_to_be_graded(own: Server) -> None:
    result, _ = run(own, "agent_classes:Stops")
    assert (result.reward, result.verdict.cause) == (1.0, Cause.AGENT_CRASHED), result.verdict


@pytest.mark.parametrize(
    ("agent", "cause", "said"),
    [
        ("agent_classes:Crashes", Cause.AGENT_CRASHED, "by zero"),
        ("agent_classes:FailsToSetUp", Cause.AGENT_SETUP_FAILED, "no such package: gold"),
        ("agent_classes:NotBuilt", Cause.AGENT_SETUP_FAILED, "wants a colour"),
        ("agent_classes:NoAgent", Cause.AGENT_SETUP_FAILED, "not a subclass"),
        ("agent_classes:Absent", Cause.AGENT_SETUP_FAILED, "no class 'Absent'"),
        ("no_such_module:Agent", Cause.AGENT_SETUP_FAILED, "no_such_module"),
        ("terminus2", Cause.AGENT_SETUP_FAILED, "did you mean 'terminus-2'?"),
        ("mini_swe_agent", Cause.AGENT_SETUP_FAILED, "did you mean 'mini-swe-agent'?"),
        ("zzz", Cause.AGENT_SETUP_FAILED, "no agent 'zzz'"),
    ],
)
def test_what_cannot_work_gives_no_verdict(
    own: Server, agent: str, cause: Cause, said: str
) -> None:
    result, model = run(own, agent)
    assert_no_verdict(result, cause, re.escape(said))
    assert not model.requests


@pytest.mark.slow
def test_an_agent_that_installs_itself_needs_a_network(own: Server) -> None:
    result, model = run(own, "codex")
    assert_no_verdict(result, Cause.AGENT_SETUP_FAILED, "")
    assert not model.requests


@pytest.mark.parametrize("agent", ["mini-swe-agent", "terminus-2", "codex"])
def test_an_agent_that_calls_a_model_needs_its_address(own: Server, agent: str) -> None:
    result = own.run("answer", agent)
    assert_no_verdict(result, Cause.AGENT_SETUP_FAILED, "base_url")


def test_health_lists_the_agents(own: Server) -> None:
    agents = own.call(lambda client: client.health()).agents
    assert agents[:4] == ["mini-swe-agent", "terminus-2", "oracle", "nop"]
    assert "codex" in agents and len(agents) == len(set(agents))
