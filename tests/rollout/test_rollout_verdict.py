"""How a trial's grade and the session's record become one verdict."""

from __future__ import annotations

import pytest

from miles_core.rollout.place import join_verdict
from miles_core.sessions.protocol import SessionSamples
from miles_core.verdicts import POLICY_CAUSES, Cause, Verdict, VerdictKind

TURN = {"rid": "r", "start": 1, "end": 2, "weight_version": 1, "finish_reason": "stop"}
SAMPLE = {"tokens": [1, 2], "loss_mask": [0, 1], "logprobs": [0.0, -0.5], "turns": [TURN]}
GRADED = Verdict.graded(1.0, {"reward": 1.0})


def recorded(calls: int = 1, end_reason: str | None = None, samples=(SAMPLE,)) -> SessionSamples:
    return SessionSamples.model_validate(
        {
            "session_id": "x",
            "model_calls": calls,
            "end_reason": end_reason,
            "samples": list(samples),
        }
    )


def test_a_grade_stands_when_the_session_is_sound():
    assert join_verdict(GRADED, recorded()) == GRADED


def test_a_grade_without_a_model_call_is_no_verdict():
    verdict = join_verdict(GRADED, recorded(calls=0, samples=()))
    assert (verdict.kind, verdict.cause) == (VerdictKind.NO_VERDICT, Cause.NO_MODEL_CALL)
    assert verdict.reward is None


@pytest.mark.parametrize("reason", ["engine_failed", "session_failed"])
def test_a_grade_after_a_failure_of_the_world_is_no_verdict(reason):
    verdict = join_verdict(GRADED, recorded(end_reason=reason))
    assert (verdict.kind, verdict.cause) == (VerdictKind.NO_VERDICT, reason)


@pytest.mark.parametrize("reason", ["token_budget", "turn_limit"])
def test_a_session_that_ended_for_its_budget_names_the_cause_and_keeps_the_grade(reason):
    verdict = join_verdict(GRADED, recorded(end_reason=reason))
    assert (verdict.reward, verdict.cause) == (1.0, reason)


@pytest.mark.parametrize("cause", sorted(set(Cause) - POLICY_CAUSES))
def test_no_verdict_stays_no_verdict_whatever_the_session_says(cause):
    verdict = Verdict.no_verdict(cause)
    assert join_verdict(verdict, recorded()) == verdict


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "graded"},
        {"kind": "graded", "reward": float("nan")},
        {"kind": "graded", "reward": float("inf")},
        {"kind": "policy_failed", "cause": "sandbox_failed", "reward": 0.0},
        {"kind": "policy_failed", "cause": "turn_limit", "reward": 1.0},
        {"kind": "policy_failed", "reward": 0.0},
        {"kind": "no_verdict", "cause": "sandbox_failed", "reward": 0.0},
        {"kind": "no_verdict"},
        {"kind": "no_verdict", "cause": "never heard of"},
    ],
)
def test_an_inconsistent_verdict_cannot_be_made(fields):
    with pytest.raises(ValueError):
        Verdict.model_validate(fields)
