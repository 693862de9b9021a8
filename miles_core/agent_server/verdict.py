"""From what Harbor recorded about a trial to one verdict.

The only source of a reward is the verifier's. Everything else says why there is none.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harbor.models.task.task import Task
from harbor.models.trial.result import ExceptionInfo, StepResult, TimingInfo
from harbor.models.trial.result import TrialResult as HarborResult

from miles_core.agent_server import evidence
from miles_core.agent_server.agents import HOST_AGENTS, AgentJob
from miles_core.agent_server.agents.outcome import TIMEOUT, ended_early
from miles_core.agent_server.protocol import PROBE, AgentMetrics, Phase
from miles_core.agent_server.report import report_of
from miles_core.agent_server.tasks import verifier_needs_no_network
from miles_core.verdicts import Cause, Verdict

BY_EXCEPTION = {
    "EnvironmentStartTimeoutError": Cause.SANDBOX_FAILED,
    "SandboxUnsupported": Cause.SANDBOX_UNSUPPORTED,
    "DockerfileInvalid": Cause.TASK_INVALID,
    "TaskProblem": Cause.TASK_INVALID,
    "SandboxError": Cause.SANDBOX_FAILED,
    "SandboxGone": Cause.SANDBOX_FAILED,
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

UNABLE_AGENT = ", in _validate_agent_capabilities\n"
"""Where Harbor finds that a task has skills or servers that an agent knows nothing of."""

CHAINED = "\n\nThe above exception was the direct cause of the following exception:"


@dataclass
class Ended:
    """What is known when Harbor's trial has ended."""

    harbor: HarborResult
    job: AgentJob
    phase: Phase
    """The last phase that began."""
    task: Task
    trial_dir: Path
    names: dict[Phase, list[str]] = field(default_factory=dict)
    """The public names that were looked up in each phase, in a sandbox without a network."""


def decide(ended: Ended) -> Verdict:
    """The verdict of a trial that Harbor has taken to its end."""
    job, harbor = ended.job, ended.harbor
    if job.failure is not None:
        return Verdict.no_verdict(job.failure.cause, str(job.failure)[:500])
    failures = _exceptions(harbor, ended.phase)
    timed_out = any(failure.exception_type == TIMEOUT for failure, _ in failures)
    fatal = [pair for pair in failures if not ended_early(pair[0])]
    if fatal and fatal[0][1] is not Phase.VERIFIER:
        return _failed(ended, *fatal[0])
    if job.turns == 0 and job.request.agent_name not in HOST_AGENTS:
        detail = job.exit_status or ("the agent ran out of time" if timed_out else "")
        return Verdict.no_verdict(Cause.NO_MODEL_CALL, f"no model call was answered; {detail}")
    if fatal:
        return _failed(ended, *fatal[0])
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
    return Verdict.graded(reward, report_of(rewards, harbor, ended.trial_dir), cause)


def _failed(ended: Ended, failure: ExceptionInfo, phase: Phase) -> Verdict:
    """The verdict of a trial that an exception ended."""
    cause = _cause(failure, phase)
    missing = cause is Cause.REWARD_MISSING
    return Verdict.no_verdict(cause, _no_reward(ended) if missing else _detail(failure))


def choose_reward(rewards: dict[str, Any]) -> float | None:
    """The reward among named rewards: the key `reward`, or the only key there is."""
    value = rewards.get("reward", next(iter(rewards.values())) if len(rewards) == 1 else None)
    if isinstance(value, (int, float)) and abs(value) <= REWARD_LIMIT:
        return float(value)
    return None


def _untrusted(ended: Ended) -> Verdict | None:
    """Why a low reward says nothing about the agent, if so."""
    if ended.job.outage is not None:
        return Verdict.no_verdict(Cause.SESSION_FAILED, ended.job.outage)
    sign = _no_grade(ended)
    if sign is not None:
        return Verdict.no_verdict(Cause.VERIFIER_FAILED, sign[:500])
    wanted = ended.names.get(Phase.AGENT, [])
    if wanted and ended.job.request.agent_name == "oracle":
        detail = f"the solution looks for {', '.join(wanted[:5])}, and the sandbox has no network"
        return Verdict.no_verdict(Cause.SANDBOX_UNSUPPORTED, detail)
    return None


def _no_grade(ended: Ended) -> str | None:
    """A sign that the verifier could not work; one of no network where a task says it needs one."""
    offline = verifier_needs_no_network(ended.task)
    names = None if offline else ended.names.get(Phase.VERIFIER, [])
    return evidence.no_grade(ended.task.paths.task_dir, ended.trial_dir, names)


def _rewards(harbor: HarborResult) -> dict[str, Any] | None:
    """The rewards of the trial; None also when one of its steps that ran has none.

    Harbor averages over the steps that have a reward, and an agent that was stopped in a step
    hides the failure of that step's verifier.
    """
    if any(step.verifier_result is None for step in harbor.step_results or []):
        return None
    if harbor.verifier_result is None or harbor.verifier_result.rewards is None:
        return None
    return dict(harbor.verifier_result.rewards)


def _exceptions(harbor: HarborResult, phase: Phase) -> list[tuple[ExceptionInfo, Phase]]:
    """Those of the trial and of its steps, each with the phase that it came in."""
    found = [] if harbor.exception_info is None else [(harbor.exception_info, phase)]
    for step in harbor.step_results or []:
        if step.exception_info is not None:
            found.append((step.exception_info, _phase(step, step.exception_info)))
    return found


def _phase(step: StepResult, failure: ExceptionInfo) -> Phase:
    """The phase of a step in which its exception came, by the clock."""
    for timing, phase in ((step.verifier, Phase.VERIFIER), (step.agent_execution, Phase.AGENT)):
        started = timing.started_at if timing is not None else None
        if started is not None and failure.occurred_at >= started:
            return phase
    return Phase.ENVIRONMENT


def _cause(failure: ExceptionInfo, phase: Phase) -> Cause:
    kind, message = failure.exception_type, failure.exception_message
    if kind in BY_EXCEPTION:
        return BY_EXCEPTION[kind]
    if UNABLE_AGENT in failure.exception_traceback:
        return Cause.SANDBOX_UNSUPPORTED
    if "\nmiles_core.agent_server.sandbox.errors.SandboxGone: " in failure.exception_traceback:
        return Cause.SANDBOX_FAILED
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
    said = _no_grade(ended) or evidence.last_words(ended.trial_dir)
    return "the verifier wrote no reward file" + (f"; {said}" if said else "")


def _ungraded(ended: Ended) -> Verdict:
    """An early end of the agent hides the verifier's own error: look at what it left."""
    steps = ended.harbor.step_results or []
    timing = steps[-1].verifier if steps else ended.harbor.verifier
    if timing is None or timing.started_at is None:
        return Verdict.no_verdict(Cause.VERIFIER_FAILED, "the verifier did not run")
    limit, took = _verifier_limit(ended), _seconds(timing)
    if took is not None and took >= limit:
        return Verdict.no_verdict(Cause.VERIFIER_TIMEOUT, f"the verifier exceeded {limit:g} s")
    folder = ended.trial_dir / "steps" / steps[-1].step_name if steps else ended.trial_dir
    files = [folder / "verifier" / name for name in ("reward.json", "reward.txt")]
    if any(file.exists() for file in files):
        return Verdict.no_verdict(Cause.REWARD_INVALID, "the reward file holds no finite number")
    return Verdict.no_verdict(Cause.REWARD_MISSING, _no_reward(ended))


def _verifier_limit(ended: Ended) -> float:
    """The seconds that the last verifier had."""
    config, steps = ended.task.config, ended.harbor.step_results or []
    limit = config.verifier.timeout_sec
    for step in config.steps or []:
        if steps and step.name == steps[-1].step_name and step.verifier.timeout_sec is not None:
            limit = step.verifier.timeout_sec
    return min(limit, ended.harbor.config.verifier.max_timeout_sec or limit)


def metrics(ended: Ended, total_s: float) -> AgentMetrics:
    """Counts and times of the trial's phases."""
    harbor, job = ended.harbor, ended.job
    steps = harbor.step_results or []
    called = job.request.agent_name not in HOST_AGENTS
    return AgentMetrics(
        turns=job.turns if called else None,
        tool_calls=job.tool_calls if called else None,
        n_input_tokens=job.input_tokens if called else None,
        n_output_tokens=job.output_tokens if called else None,
        env_setup_time=_seconds(harbor.environment_setup),
        agent_setup_time=_seconds(harbor.agent_setup),
        agent_run_time=_total(harbor.agent_execution, (s.agent_execution for s in steps)),
        eval_time=_total(harbor.verifier, (s.verifier for s in steps)),
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


def _total(whole: TimingInfo | None, steps: Iterable[TimingInfo | None]) -> float | None:
    """The seconds of a phase, or of those of all steps."""
    parts = [_seconds(timing) for timing in (whole, *steps)]
    known = [part for part in parts if part is not None]
    return round(sum(known), 4) if known else None


def _seconds(timing: TimingInfo | None) -> float | None:
    if timing is None or timing.started_at is None or timing.finished_at is None:
        return None
    return round((timing.finished_at - timing.started_at).total_seconds(), 4)
