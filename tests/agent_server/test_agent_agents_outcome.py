"""What Harbor's result says of an agent whose model calls are not seen."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("harbor")
from harbor.models.agent.context import AgentContext  # noqa: E402
from harbor.models.trial.result import ExceptionInfo, StepResult, TimingInfo  # noqa: E402
from harbor.models.trial.result import TrialResult as HarborResult  # noqa: E402

from miles_core.agent_server.agents import AgentJob  # noqa: E402
from miles_core.agent_server.agents.outcome import ended_early, settle, was_ended  # noqa: E402
from miles_core.agent_server.protocol import TrialRequest  # noqa: E402
from miles_core.verdicts import Cause  # noqa: E402

pytestmark = pytest.mark.agent_env

NOW = datetime.now(UTC)


def failure(kind: str, message: str = "said") -> ExceptionInfo:
    return ExceptionInfo(
        exception_type=kind, exception_message=message, exception_traceback="", occurred_at=NOW
    )


def unseen(name: str = "codex") -> AgentJob:
    request = TrialRequest(instance_id="t", agent_name=name, base_url="http://127.0.0.1:1/v1")
    return AgentJob(request, {}, None, None, None, None)


def result(kind: str | None = None, *, phase: str = "agent", **fields: Any) -> HarborResult:
    times = TimingInfo(started_at=NOW, finished_at=NOW)
    values: dict[str, Any] = {
        "exception_info": failure(kind) if kind else None,
        "agent_setup": times,
        "agent_execution": times if phase == "agent" else None,
        "agent_result": None,
        "step_results": None,
        **fields,
    }
    return HarborResult.model_construct(**values)


@pytest.mark.parametrize(
    ("kind", "phase", "cause"),
    [
        ("NonZeroAgentExitCodeError", "setup", Cause.AGENT_SETUP_FAILED),
        ("AgentSetupTimeoutError", "setup", Cause.AGENT_SETUP_FAILED),
        ("ApiRateLimitError", "agent", Cause.SESSION_FAILED),
        ("NetworkConnectionError", "agent", Cause.SESSION_FAILED),
        ("NonZeroAgentExitCodeError", "agent", Cause.NO_MODEL_CALL),
        ("AgentTimeoutError", "agent", Cause.NO_MODEL_CALL),
    ],
)
def test_what_is_not_the_policys_doing(tmp_path: Path, kind: str, phase: str, cause: Cause) -> None:
    job = unseen()
    settle(job, result(kind, phase=phase), tmp_path)
    assert job.failure is not None and job.failure.cause is cause
    assert kind in str(job.failure)


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("ContextWindowExceededError", Cause.TOKEN_BUDGET),
        ("OutputTokenExceededError", Cause.TOKEN_BUDGET),
        ("AgentTimeoutError", None),
        ("NonZeroAgentExitCodeError", None),
        ("AgentSafetyRefusalError", None),
    ],
)
def test_what_is_graded_of_an_agent_that_called_the_model(
    tmp_path: Path, kind: str, cause: Cause | None
) -> None:
    job = unseen()
    harbor = result(kind, agent_result=AgentContext(n_input_tokens=70, n_output_tokens=9))
    settle(job, harbor, tmp_path)
    assert job.failure is None and job.cause is cause
    assert (job.turns, job.input_tokens, job.output_tokens) == (None, 70, 9)
    assert ended_early(failure(kind)) and was_ended(job, harbor)


def test_the_end_of_a_class_of_ones_own_is_its_own(tmp_path: Path) -> None:
    job = unseen("module:Class")
    settle(job, result("NonZeroAgentExitCodeError"), tmp_path)
    assert job.failure is None


def test_a_fault_of_the_sandbox_is_not_the_agents(tmp_path: Path) -> None:
    job = unseen()
    settle(job, result("SandboxError", phase="setup"), tmp_path)
    assert job.failure is None and not ended_early(failure("SandboxError"))


def test_counts_come_from_trajectories(tmp_path: Path) -> None:
    steps = [
        {"source": "user", "message": "do"},
        {"source": "agent", "tool_calls": [{}, {}]},
        {"source": "agent", "tool_calls": None},
    ]
    for place in ("agent", "steps/one/agent"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "trajectory.json").write_text(json.dumps({"steps": steps}))
    job = unseen()
    reports = [StepResult(step_name="one", agent_result=AgentContext(n_output_tokens=4))]
    settle(job, result(step_results=reports), tmp_path)
    assert (job.turns, job.tool_calls) == (4, 4)
    assert (job.input_tokens, job.output_tokens) == (None, 4)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"steps": 5}', '{"steps": [7, null]}', "[" * 100_000]
)
def test_a_trajectory_may_be_anything(tmp_path: Path, content: str) -> None:
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent/trajectory.json").write_text(content)
    job = unseen()
    settle(job, result(), tmp_path)
    assert (job.turns, job.failure) == (None, None)


def test_a_trajectory_is_no_way_to_another_file(tmp_path: Path) -> None:
    (tmp_path / "agent").mkdir()
    (tmp_path / "other.json").write_text(json.dumps({"steps": [{"source": "agent"}]}))
    (tmp_path / "agent/trajectory.json").symlink_to(tmp_path / "other.json")
    job = unseen()
    settle(job, result(), tmp_path)
    assert job.turns is None


def test_the_running_step_decides_whether_its_agent_was_ended() -> None:
    late = StepResult(step_name="one", exception_info=failure("AgentTimeoutError"))
    fine = StepResult(step_name="two")
    assert not was_ended(unseen(), result(step_results=[late, fine]))
    assert was_ended(unseen(), result(step_results=[fine, late]))
