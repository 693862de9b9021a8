"""From the trials of a task to its state, in plain words."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from miles_core.admission.report import State, TaskReport, Trial
from miles_core.agent_server.protocol import FORGED_REWARD, TrialResult
from miles_core.verdicts import Cause

FULL_REWARD = 1.0

WORLD = frozenset(
    {
        Cause.SANDBOX_FAILED,
        Cause.AGENT_SETUP_FAILED,
        Cause.CANCELLED,
        Cause.LEASE_EXPIRED,
        Cause.SERVER_RESTARTED,
        Cause.AGENT_SERVER_UNREACHABLE,
        Cause.INTERNAL_ERROR,
    }
)
"""Causes that say nothing of the task."""

FINAL = frozenset(
    {
        *WORLD,
        Cause.TASK_INVALID,
        Cause.TASK_NOT_FOUND,
        Cause.SANDBOX_UNSUPPORTED,
        Cause.VERIFIER_TIMEOUT,
        Cause.TRIAL_TIMEOUT,
    }
)
"""Causes after which another trial of the task would tell nothing new."""

_MISSING = re.compile(r" has no (\S*(?:task\.toml|instruction\.md|test\.sh))$")
_NO_SOLUTION = ("Solution script", "No OS-compatible solution")
_TIMES = {
    "environment": "env_setup_time",
    "agent_setup": "agent_setup_time",
    "agent": "agent_run_time",
    "verifier": "eval_time",
    "total": "total_time",
}

LOOK = "`miles tasks check --trials-dir DIR` keeps what its trials said"
FIX_ORACLE = f"correct solution/ or tests/; {LOOK}"
NO_NETWORK = (
    "and the sandbox has no network: if tests or solution need one without a word of it, bring "
    "what they fetch with environment/Dockerfile, or check with --sandbox docker"
)
FIX_NOP_FULL = "let the tests check what the instruction asks for"
FIX_NOP_NONE = "let the verifier write a reward in every case, 0 when nothing was done"
FIX_REWARD = (
    "let the verifier write one number, or a key 'reward' with one; 0 when nothing was done"
)
FIX_FORGED = "let the verifier compute the reward itself, from no file where an agent may write it"
FIX_VISIBLE = "take tests and solution out of environment/ and out of every git history there"
FIX_VERIFIER = (
    "let environment/Dockerfile bring what the verifier needs, or check it with --sandbox docker"
)
FIX_SLOW = "let the tests end, or raise timeout_sec of [verifier] in task.toml"
FIX_PARSE = "correct the task's files"
FIX_MISSING = {
    "task.toml": "add it, with the task's limits; an empty one has Harbor's defaults",
    "instruction.md": "add it: it tells the agent what to do",
    "test.sh": "add it: the script that grades, which writes a number to /logs/verifier/reward.txt",
}
"""What to do about a file that a task lacks, by the last part of its name."""
FIX_SANDBOX = "check it in another sandbox (--sandbox docker), or leave its rows out"
FIX_SOLUTION = "add solution/solve.sh, so that a check can show that full reward can be reached"
FIX_WORLD = "try again; when it stays, see the agent server's log"
FIX_START = "try again; when it stays, correct what the task's environment lacks"

_WORDS = {
    Cause.REWARD_MISSING: ("the verifier wrote no reward", FIX_NOP_NONE),
    Cause.REWARD_INVALID: ("", FIX_REWARD),
    Cause.VERIFIER_TIMEOUT: ("the verifier did not end in its time", FIX_SLOW),
    Cause.TRIAL_TIMEOUT: ("the trial did not end in its time", FIX_SLOW),
    Cause.VERIFIER_FAILED: ("", FIX_VERIFIER),
}
"""What a cause means, where its detail need not be told, and what to do."""


def trial_of(result: TrialResult) -> Trial:
    """What a report keeps of a trial."""
    metrics = result.agent_metrics
    times = {name: getattr(metrics, key) for name, key in _TIMES.items()}
    return Trial(
        reward=result.reward,
        cause=result.verdict.cause,
        detail=result.verdict.detail,
        seconds={name: value for name, value in times.items() if value is not None},
    )


def lacks_solution(result: TrialResult) -> bool:
    """Whether `oracle` could not work because there is no solution."""
    words = result.verdict.detail.partition(": ")[2]
    return result.verdict.cause is Cause.TASK_INVALID and words.startswith(_NO_SOLUTION)


@dataclass
class Evidence:
    """The trials of one task; what was not run is None or empty."""

    nop: TrialResult | None = None
    oracle: TrialResult | None = None
    probes: list[TrialResult] = field(default_factory=list)
    proven: bool = True
    """Whether there is a solution to prove the task with; `oracle` is None otherwise."""
    offline: bool = False
    """Whether the sandbox has no network, and the task does not declare that it needs none."""


def judge(task: str, seen: Evidence) -> TaskReport:
    """The report of a task: every reason against it, and `admitted` only without any."""
    report = TaskReport(task=task, state=State.ADMITTED)
    report.nop = trial_of(seen.nop) if seen.nop else None
    report.oracle = trial_of(seen.oracle) if seen.oracle else None
    trials = [result for result in (seen.nop, seen.oracle, *seen.probes) if result is not None]
    metrics = [result.agent_metrics for result in trials]
    report.disk_bytes = _largest(m.disk_bytes for m in metrics)
    report.memory_peak_bytes = _largest(m.memory_peak_bytes for m in metrics)
    report.seconds = round(sum(r.agent_metrics.total_time or 0.0 for r in trials), 3)
    state = _final(report, trials)
    if state is not None:
        report.state = state
        return report
    _judge_nop(report)
    _judge_oracle(report, seen.offline)
    _judge_probes(report, seen.probes)
    if report.reasons:
        report.state = State.FAILED
    elif not seen.proven:
        report.state = State.UNPROVEN
        _against(report, "it has no solution that could prove it", FIX_SOLUTION)
    elif report.oracle is None or report.nop is None or not seen.probes:
        raise ValueError(f"{task}: a task cannot be admitted by {len(trials)} trials")
    return report


def _against(report: TaskReport, reason: str, fix: str) -> None:
    report.reasons.append(reason)
    report.fixes.append(fix)


def _no_verdict(report: TaskReport, when: str, trial: Trial, fix: str) -> None:
    words, fix = _WORDS.get(Cause(trial.cause), ("", fix)) if trial.cause else ("", fix)
    _against(report, f"no verdict {when} ({trial.cause}): {words or trial.detail}", fix)


def _final(report: TaskReport, trials: list[TrialResult]) -> State | None:
    """The state, when one trial says all there is to say."""
    for result in trials:
        cause, detail = result.verdict.cause, result.verdict.detail
        if result.reward is not None or cause is None:
            continue
        if cause is Cause.SANDBOX_UNSUPPORTED:
            _against(report, detail.removeprefix("SandboxUnsupported: "), FIX_SANDBOX)
            return State.UNSUPPORTED
        if cause in WORLD:
            fix = FIX_START if cause is Cause.SANDBOX_FAILED else FIX_WORLD
            _against(report, f"no verdict ({cause}): {detail}", fix)
            return State.UNDECIDED
        if cause in (Cause.TASK_INVALID, Cause.TASK_NOT_FOUND):
            missing = _MISSING.search(detail)
            if missing:
                name = missing.group(1)
                _against(report, f"it has no {name}", FIX_MISSING[name.rpartition("/")[2]])
            else:
                _against(report, detail, FIX_PARSE)
            return State.FAILED
    return None


def _judge_nop(report: TaskReport) -> None:
    nop = report.nop
    if nop is None:
        return
    if nop.reward is None:
        _no_verdict(report, "when nothing was done", nop, FIX_NOP_NONE)
    elif nop.reward >= FULL_REWARD:
        _against(report, f"reward {nop.reward:g} for doing nothing", FIX_NOP_FULL)


def _judge_oracle(report: TaskReport, offline: bool) -> None:
    oracle = report.oracle
    if oracle is None:
        return
    stopped = " after its time was up" if oracle.cause == Cause.AGENT_TIMEOUT else ""
    if oracle.reward is None:
        _no_verdict(report, "on the solution", oracle, FIX_ORACLE)
    elif oracle.reward < FULL_REWARD:
        fix = f"{FIX_ORACLE}; {NO_NETWORK}" if offline else FIX_ORACLE
        _against(report, f"the solution gets {oracle.reward:g}, not 1{stopped}", fix)
    elif stopped:
        report.notes.append("the solution gets full reward, but only after its time was up")


def _judge_probes(report: TaskReport, probes: list[TrialResult]) -> None:
    """A forged reward is known by its value, in the reward and in all that the verifier reports."""
    for result in probes:
        found = result.agent_metrics.probe
        if found is None:
            cause = result.verdict.cause or "no cause"
            _against(report, f"the probe did not get to its end ({cause})", FIX_WORLD)
            continue
        report.findings += found.get("findings", [])
        report.notes += found.get("notes", [])
        survives = FORGED_REWARD in _rewards(result)
        report.forged_reward_survives = bool(report.forged_reward_survives) or survives
        if not survives and (result.reward or 0.0) >= FULL_REWARD and not _nop_is_full(report):
            report.notes.append("files of any content where the tests look get full reward")
        report.solution_hidden = not report.findings
    report.notes = list(dict.fromkeys(report.notes))  # both probes may have the same to say
    if report.forged_reward_survives:
        _against(report, "a reward that the agent wrote is taken for the verifier's", FIX_FORGED)
    if report.findings:
        _against(report, "; ".join(report.findings), FIX_VISIBLE)


def _rewards(result: TrialResult) -> list[Any]:
    """Every reward that a trial tells of, those of its steps too."""
    named = [result.eval_report, *(step["rewards"] for step in result.eval_report.get("steps", []))]
    return [result.reward, *(value for rewards in named for value in rewards.values())]


def _nop_is_full(report: TaskReport) -> bool:
    return report.nop is not None and (report.nop.reward or 0.0) >= FULL_REWARD


def _largest(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)
