"""From what Harbor recorded about a trial to one verdict.

The only source of a reward is the verifier's. Everything else says why there is none.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harbor.models.trial.result import ExceptionInfo, TimingInfo
from harbor.models.trial.result import TrialResult as HarborResult

from miles_core.agent_server import evidence
from miles_core.agent_server.agents import HOST_AGENTS, AgentJob
from miles_core.agent_server.agents.outcome import TIMEOUT, ended_early
from miles_core.agent_server.protocol import PROBE, AgentMetrics, Phase
from miles_core.verdicts import Cause, Verdict

BY_EXCEPTION = {
    "EnvironmentStartTimeoutError": Cause.SANDBOX_FAILED,
    "SandboxUnsupported": Cause.SANDBOX_UNSUPPORTED,
    "SandboxError": Cause.SANDBOX_FAILED,
    "SandboxBuildFailedError": Cause.SANDBOX_FAILED,
    "HealthcheckError": Cause.SANDBOX_FAILED,
    "AgentSetupTimeoutError": Cause.AGENT_SETUP_FAILED,
    "VerifierTimeoutError": Cause.VERIFIER_TIMEOUT,
    "RewardFileNotFoundError": Cause.REWARD_MISSING,
    "RewardFileEmptyError": Cause.REWARD_INVALID,
    "VerifierOutputParseError": Cause.REWARD_INVALID,
}

BY_PHASE = {
    Phase.ENVIRONMENT: Cause.SANDBOX_FAILED,
    Phase.AGENT_SETUP: Cause.AGENT_SETUP_FAILED,
    Phase.AGENT: Cause.AGENT_CRASHED,
    Phase.VERIFIER: Cause.VERIFIER_FAILED,
}

FULL_REWARD = 1.0
REWARD_LIMIT = 1e6
"""The largest size of a reward: sums and squares of such numbers stay exact enough to train on."""

CHAINED = "\n\nThe above exception was the direct cause of the following exception:"


@dataclass
class Ended:
    """What is known when Harbor's trial has ended."""

    harbor: HarborResult
    job: AgentJob
    phase: Phase
    task_dir: Path
    trial_dir: Path
    names: dict[Phase, list[str]] = field(default_factory=dict)
    """The public names that were looked up in each phase, in a sandbox without a network."""


def decide(ended: Ended) -> Verdict:
    """The verdict of a trial that Harbor has taken to its end."""
    job, harbor = ended.job, ended.harbor
    failures = _exceptions(harbor)
    if job.failure is not None:
        return Verdict.no_verdict(job.failure.cause, str(job.failure)[:500])
    timed_out = any(failure.exception_type == TIMEOUT for failure in failures)
    fatal = [failure for failure in failures if not ended_early(failure)]
    if fatal:
        fault = _cause(fatal[0], ended.phase)
        missing = fault is Cause.REWARD_MISSING
        return Verdict.no_verdict(fault, _no_reward(ended) if missing else _detail(fatal[0]))
    if job.turns == 0 and job.request.agent_name not in HOST_AGENTS:
        detail = job.exit_status or ("the agent ran out of time" if timed_out else "")
        return Verdict.no_verdict(Cause.NO_MODEL_CALL, f"no model call was answered; {detail}")
    rewards = _rewards(harbor)
    if rewards is None:
        return _ungraded(ended)
    reward = choose_reward(rewards)
    if reward is None:
        detail = f"no key 'reward' with a number within {REWARD_LIMIT:g} in {rewards}"
        return Verdict.no_verdict(Cause.REWARD_INVALID, detail[:500])
    if reward < FULL_REWARD:
        untrusted = _untrusted(ended)
        if untrusted is not None:
            return untrusted
    cause = Cause.AGENT_TIMEOUT if timed_out else job.cause
    if cause is None and failures:
        cause = Cause.AGENT_CRASHED
    return Verdict.graded(reward, rewards, cause)


def choose_reward(rewards: dict[str, Any]) -> float | None:
    """The reward among named rewards: the key `reward`, or the only key there is."""
    value = rewards.get("reward", next(iter(rewards.values())) if len(rewards) == 1 else None)
    if isinstance(value, (int, float)) and abs(value) <= REWARD_LIMIT:
        return float(value)
    return None


def _untrusted(ended: Ended) -> Verdict | None:
    """Why a low reward says nothing about the agent, if so."""
    sign = evidence.no_grade(ended.task_dir, ended.trial_dir, ended.names.get(Phase.VERIFIER, []))
    if sign is not None:
        return Verdict.no_verdict(Cause.VERIFIER_FAILED, sign[:500])
    wanted = ended.names.get(Phase.AGENT, [])
    if wanted and ended.job.request.agent_name == "oracle":
        detail = f"the solution looks for {', '.join(wanted[:5])}, and the sandbox has no network"
        return Verdict.no_verdict(Cause.SANDBOX_UNSUPPORTED, detail)
    return None


def _rewards(harbor: HarborResult) -> dict[str, Any] | None:
    if harbor.verifier_result is None or harbor.verifier_result.rewards is None:
        return None
    return dict(harbor.verifier_result.rewards)


def _exceptions(harbor: HarborResult) -> list[ExceptionInfo]:
    """Those of the trial and, for a task of several steps, those of its steps."""
    steps = [step.exception_info for step in harbor.step_results or []]
    return [info for info in [harbor.exception_info, *steps] if info is not None]


def _cause(failure: ExceptionInfo, phase: Phase) -> Cause:
    kind, message = failure.exception_type, failure.exception_message
    if kind in BY_EXCEPTION:
        return BY_EXCEPTION[kind]
    if kind == "FileNotFoundError" and message.startswith(("Solution script", "No test script")):
        return Cause.TASK_INVALID
    if kind == "FileNotFoundError" and "No OS-compatible solution" in message:
        return Cause.TASK_INVALID
    if kind in ("ValidationError", "IsADirectoryError") and phase is Phase.VERIFIER:
        return Cause.REWARD_INVALID
    return BY_PHASE.get(phase, Cause.INTERNAL_ERROR)


def _detail(failure: ExceptionInfo) -> str:
    """The exception in one line, with the one that it came from."""
    text = f"{failure.exception_type}: {' '.join(failure.exception_message.split())}"
    first, chained, _ = failure.exception_traceback.partition(CHAINED)
    if chained:
        origin = " ".join(first.strip().rpartition("\n")[2].split())
        text = f"{text[:200]} ({origin.removeprefix('miles_core.agent_server.sandbox.errors.')})"
    return text[:500]


def _no_reward(ended: Ended) -> str:
    """What is known of a verifier that wrote no reward."""
    sign = evidence.no_grade(ended.task_dir, ended.trial_dir, ended.names.get(Phase.VERIFIER, []))
    said = sign or evidence.last_words(ended.trial_dir)
    return "the verifier wrote no reward file" + (f"; {said}" if said else "")


def _ungraded(ended: Ended) -> Verdict:
    """An early end of the agent hides the verifier's own error: look at what it left."""
    timing = ended.harbor.verifier
    if timing is None or timing.started_at is None:
        return Verdict.no_verdict(Cause.VERIFIER_FAILED, "the verifier did not run")
    files = [ended.trial_dir / "verifier" / name for name in ("reward.json", "reward.txt")]
    if any(file.exists() for file in files):
        return Verdict.no_verdict(Cause.REWARD_INVALID, "the reward file holds no finite number")
    return Verdict.no_verdict(Cause.REWARD_MISSING, _no_reward(ended))


def metrics(ended: Ended, total_s: float) -> AgentMetrics:
    """Counts and times of the trial's phases."""
    harbor, job = ended.harbor, ended.job
    called = job.request.agent_name not in HOST_AGENTS
    return AgentMetrics(
        turns=job.turns if called else None,
        tool_calls=job.tool_calls if called else None,
        n_input_tokens=job.input_tokens if called else None,
        n_output_tokens=job.output_tokens if called else None,
        env_setup_time=_seconds(harbor.environment_setup),
        agent_setup_time=_seconds(harbor.agent_setup),
        agent_run_time=_seconds(harbor.agent_execution),
        eval_time=_seconds(harbor.verifier),
        total_time=round(total_s, 4),
        probe=_probed(harbor) if job.request.agent_name == PROBE else None,
    )


def _probed(harbor: HarborResult) -> dict[str, Any] | None:
    """What the agent `probe` found; in a task of several steps, in the first of them."""
    contexts = [harbor.agent_result, *(step.agent_result for step in harbor.step_results or [])]
    for context in contexts:
        if context is not None and context.metadata and PROBE in context.metadata:
            return dict(context.metadata[PROBE])
    return None


def _seconds(timing: TimingInfo | None) -> float | None:
    if timing is None or timing.started_at is None or timing.finished_at is None:
        return None
    return round((timing.finished_at - timing.started_at).total_seconds(), 4)
