"""How an agent ended, read from Harbor's result: for those whose model calls are not seen, and
for all of them what Harbor records only as an exception."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harbor.agents.installed.base import (
    AgentSafetyRefusalError,
    ApiError,
    ContextWindowExceededError,
    NetworkConnectionError,
    NonZeroAgentExitCodeError,
    OutputTokenExceededError,
)
from harbor.models.agent.context import AgentContext
from harbor.models.trial.result import ExceptionInfo
from harbor.models.trial.result import TrialResult as HarborResult

from miles_core.agent_server.agents.job import AgentJob
from miles_core.verdicts import Cause

TIMEOUT = "AgentTimeoutError"
TRAJECTORY = "trajectory.json"
TRAJECTORY_LIMIT = 64 << 20
"""Bytes of a trajectory that is read for its counts."""


def _names(*roots: type[BaseException]) -> set[str]:
    """The names of exception classes and of all classes below them, as they are now."""
    found = {root.__name__ for root in roots}
    for root in roots:
        found |= _names(*root.__subclasses__()) if root.__subclasses__() else set()
    return found


def ended_early(failure: ExceptionInfo) -> bool:
    """Whether Harbor runs the verifier after this exception of an agent."""
    return failure.exception_type in {TIMEOUT, *_names(NonZeroAgentExitCodeError)}


def was_ended(job: AgentJob, harbor: HarborResult) -> bool:
    """Whether the agent, or the one of the step that runs, was ended and did not end by itself."""
    steps = harbor.step_results or []
    failure = steps[-1].exception_info if steps else harbor.exception_info
    return failure is not None or job.cause in (Cause.AGENT_TIMEOUT, Cause.AGENT_CRASHED)


def settle(job: AgentJob, harbor: HarborResult, trial_dir: Path) -> None:
    """Complete a job by what Harbor's result says of its agent: counts, cause and failure."""
    if job.turns is None:
        _count(job, harbor, trial_dir)
    in_setup = harbor.agent_setup is not None and harbor.agent_execution is None
    if in_setup and not harbor.step_results:
        _setup_failed(job, harbor.exception_info)
        return
    for info in (
        harbor.exception_info,
        *(step.exception_info for step in harbor.step_results or []),
    ):
        if info is not None and job.failure is None:
            _stopped(job, info)


def _setup_failed(job: AgentJob, failure: ExceptionInfo | None) -> None:
    if failure is None or job.failure is not None:
        return
    if failure.exception_type not in ("SandboxError", "CancelledError"):
        job.fail(Cause.AGENT_SETUP_FAILED, _told(failure))


def _told(failure: ExceptionInfo) -> str:
    return " ".join(f"{failure.exception_type}: {failure.exception_message}".split())


def _stopped(job: AgentJob, failure: ExceptionInfo) -> None:
    """What an exception of the agent's phase says: its limit, the endpoint's fault, or neither."""
    if failure.exception_type in _names(ContextWindowExceededError, OutputTokenExceededError):
        job.cause = Cause.TOKEN_BUDGET
    elif failure.exception_type in _names(ApiError, NetworkConnectionError) - _names(
        AgentSafetyRefusalError
    ):
        job.fail(Cause.SESSION_FAILED, _told(failure))
    elif ended_early(failure) and _without_a_call(job):
        job.fail(Cause.NO_MODEL_CALL, f"no model call of the agent is known; {_told(failure)}")


def _without_a_call(job: AgentJob) -> bool:
    """Whether an agent of Harbor's, which all call a model, left no sign that it did."""
    unseen = job.turns is None and ":" not in job.request.agent_name
    return unseen and bool(job.request.base_url) and not job.output_tokens


def _count(job: AgentJob, harbor: HarborResult, trial_dir: Path) -> None:
    """Take tokens from what the agent reported, turns and tool calls from its trajectories."""
    reports = [harbor.agent_result, *(step.agent_result for step in harbor.step_results or [])]
    job.input_tokens = _total(reports, "n_input_tokens")
    job.output_tokens = _total(reports, "n_output_tokens")
    for folder in [trial_dir, *sorted(trial_dir.glob("steps/*"))]:
        for step in _steps(folder / "agent" / TRAJECTORY):
            if step.get("source") == "agent":
                job.turns = (job.turns or 0) + 1
                calls = step.get("tool_calls")
                job.tool_calls = (job.tool_calls or 0) + (
                    len(calls) if isinstance(calls, list) else 0
                )


def _total(reports: list[AgentContext | None], name: str) -> int | None:
    given = [getattr(report, name) for report in reports if report is not None]
    numbers = [number for number in given if number is not None]
    return sum(numbers) if numbers else None


def _steps(path: Path) -> list[dict[str, Any]]:
    """The steps of a trajectory (ATIF); none where the file is no such thing.

    The file comes out of a sandbox: anything may be in it.
    """
    try:
        if path.is_symlink() or path.stat().st_size > TRAJECTORY_LIMIT:
            return []
        steps = json.loads(path.read_bytes())["steps"]
        return [step for step in steps if isinstance(step, dict)]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []
