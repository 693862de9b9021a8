"""From verdicts to a state: what is held against a task, and what is not."""

from __future__ import annotations

from typing import Any

import pytest

from miles_core.admission.judge import Evidence, judge, lacks_solution
from miles_core.admission.report import State
from miles_core.agent_server.protocol import FORGED_REWARD, AgentMetrics, TrialResult
from miles_core.verdicts import Cause, Verdict


def graded(reward: float, cause: Cause | None = None, **report: float) -> TrialResult:
    verdict = Verdict.graded(reward, {"reward": reward, **report}, cause)
    return TrialResult.of("t", verdict, AgentMetrics(total_time=1.0))


def none(cause: Cause, detail: str = "why") -> TrialResult:
    return TrialResult.of("t", Verdict.no_verdict(cause, detail), AgentMetrics(total_time=1.0))


def probed(result: TrialResult, **found: Any) -> TrialResult:
    report = {"findings": [], "notes": [], "forged": 3, **found}
    metrics = result.agent_metrics.model_copy(update={"probe": report})
    return result.model_copy(update={"agent_metrics": metrics})


def seen(**changed: Any) -> Evidence:
    good = {"nop": graded(0.0), "oracle": graded(1.0), "probes": [probed(graded(0.0))]}
    return Evidence(**{**good, **changed})


def test_a_task_is_admitted_when_nothing_speaks_against_it() -> None:
    report = judge("one", seen())
    assert (report.state, report.reasons) == (State.ADMITTED, [])
    assert report.seconds == 3.0
    assert judge("one", seen(nop=graded(0.9))).state is State.ADMITTED


@pytest.mark.parametrize("missing", [{"nop": None}, {"oracle": None}, {"probes": []}])
def test_no_task_is_admitted_by_trials_that_were_not_run(missing: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="cannot be admitted"):
        judge("one", seen(**missing))


@pytest.mark.parametrize(
    ("changed", "state"),
    [
        ({"nop": none(Cause.SANDBOX_UNSUPPORTED), "oracle": None, "probes": []}, "unsupported"),
        ({"oracle": none(Cause.SANDBOX_UNSUPPORTED), "probes": []}, "unsupported"),
        ({"nop": none(Cause.TASK_INVALID), "oracle": None, "probes": []}, "failed"),
        ({"nop": none(Cause.AGENT_SERVER_UNREACHABLE), "probes": []}, "undecided"),
        ({"probes": [none(Cause.SANDBOX_FAILED)]}, "undecided"),
        ({"probes": [none(Cause.REWARD_MISSING)]}, "failed"),
        ({"oracle": graded(0.99)}, "failed"),
        ({"oracle": none(Cause.AGENT_CRASHED)}, "failed"),
        ({"nop": graded(1.0)}, "failed"),
        ({"nop": none(Cause.REWARD_MISSING)}, "failed"),
        ({"probes": [probed(graded(0.0), findings=["the agent can read /tests"])]}, "failed"),
        ({"probes": [probed(graded(FORGED_REWARD))]}, "failed"),
        ({"probes": [probed(graded(0.0, score=FORGED_REWARD))]}, "failed"),
        (
            {
                "probes": [
                    probed(graded(0.0, steps=[{"name": "a", "rewards": {"r": FORGED_REWARD}}]))
                ]
            },
            "failed",
        ),
        ({"probes": [probed(none(Cause.VERIFIER_FAILED))]}, "admitted"),
        ({"oracle": None, "proven": False}, "unproven"),
        ({"oracle": None, "proven": False, "nop": graded(1.0)}, "failed"),
    ],
)
def test_states(changed: dict[str, Any], state: str) -> None:
    report = judge("one", seen(**changed))
    assert report.state == state
    assert bool(report.reasons) == (state != "admitted")
    assert len(report.reasons) == len(report.fixes)


def test_a_probe_that_happens_to_solve_a_task_is_only_noted() -> None:
    report = judge("one", seen(probes=[probed(graded(1.0))]))
    assert report.state is State.ADMITTED
    assert report.forged_reward_survives is False
    assert "files of any content" in report.notes[0]


def test_one_forged_reward_is_enough() -> None:
    probes = [probed(graded(FORGED_REWARD)), probed(graded(0.0))]
    assert judge("one", seen(probes=probes)).forged_reward_survives is True
    assert judge("one", seen(probes=probes[::-1])).forged_reward_survives is True


def test_full_reward_after_the_time_was_up_is_noted() -> None:
    report = judge("one", seen(oracle=graded(1.0, Cause.AGENT_TIMEOUT)))
    assert report.state is State.ADMITTED
    assert "only after its time was up" in report.notes[0]


@pytest.mark.parametrize(
    ("detail", "lacks"),
    [
        ("FileNotFoundError: Solution script not found: /t/solution/solve.sh", True),
        ("FileNotFoundError: No OS-compatible solution script found for step 'a'", True),
        ("TOMLDecodeError: Expected ']'", False),
    ],
)
def test_a_server_elsewhere_tells_that_there_is_no_solution(detail: str, lacks: bool) -> None:
    assert lacks_solution(none(Cause.TASK_INVALID, detail)) is lacks
    assert lacks_solution(none(Cause.AGENT_CRASHED, detail)) is False
