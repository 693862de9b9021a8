"""What is known about the outcome of a trial: one verdict, and nothing else carries a reward.

The agent server decides a verdict, the rollout acts on it, metrics and screens count it. All of
them use the names below. There is no default reward: a verdict without a grade has none.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator


class VerdictKind(StrEnum):
    """The three ways in which a trial ends."""

    GRADED = "graded"
    POLICY_FAILED = "policy_failed"
    NO_VERDICT = "no_verdict"


class Cause(StrEnum):
    """Why a trial has no grade, or why a graded agent was stopped early.

    The first block is the policy's own doing, the second is the world's.
    """

    TURN_LIMIT = "turn_limit"
    TOKEN_BUDGET = "token_budget"
    MALFORMED_ACTIONS = "malformed_actions"
    AGENT_TIMEOUT = "agent_timeout"

    TASK_NOT_FOUND = "task_not_found"
    TASK_INVALID = "task_invalid"
    SANDBOX_UNSUPPORTED = "sandbox_unsupported"
    SANDBOX_FAILED = "sandbox_failed"
    AGENT_SETUP_FAILED = "agent_setup_failed"
    AGENT_CRASHED = "agent_crashed"
    NO_MODEL_CALL = "no_model_call"
    VERIFIER_FAILED = "verifier_failed"
    VERIFIER_TIMEOUT = "verifier_timeout"
    REWARD_MISSING = "reward_missing"
    REWARD_INVALID = "reward_invalid"
    TRIAL_TIMEOUT = "trial_timeout"
    CANCELLED = "cancelled"
    LEASE_EXPIRED = "lease_expired"
    SERVER_RESTARTED = "server_restarted"
    AGENT_SERVER_UNREACHABLE = "agent_server_unreachable"
    SESSION_FAILED = "session_failed"
    ENGINE_FAILED = "engine_failed"
    INTERNAL_ERROR = "internal_error"


POLICY_CAUSES = frozenset(
    {Cause.TURN_LIMIT, Cause.TOKEN_BUDGET, Cause.MALFORMED_ACTIONS, Cause.AGENT_TIMEOUT}
)


class Verdict(BaseModel):
    """The outcome of one trial.

    `reward` is a finite number for `graded`, 0.0 for `policy_failed`, and None for `no_verdict`.
    `cause` is required unless the trial was graded; on a graded trial it tells why the agent was
    stopped early, if it was. `detail` is one line for a person.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: VerdictKind
    reward: float | None = None
    cause: Cause | None = None
    detail: str = ""
    report: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _consistent(self) -> Verdict:
        if self.kind is VerdictKind.GRADED:
            if self.reward is None or not math.isfinite(self.reward):
                raise ValueError(f"a graded verdict needs a finite reward, not {self.reward!r}")
            return self
        if self.cause is None:
            raise ValueError(f"a {self.kind} verdict needs a cause")
        if self.kind is VerdictKind.POLICY_FAILED:
            if self.cause not in POLICY_CAUSES:
                raise ValueError(f"{self.cause} is not the policy's doing")
            if self.reward != 0.0:
                raise ValueError("a policy_failed verdict has reward 0.0")
        elif self.reward is not None:
            raise ValueError("a no_verdict has no reward")
        return self

    @property
    def trainable(self) -> bool:
        """Whether the trial may be trained on."""
        return self.kind is not VerdictKind.NO_VERDICT

    @classmethod
    def graded(cls, reward: float, report: dict[str, Any], cause: Cause | None = None) -> Verdict:
        return cls(kind=VerdictKind.GRADED, reward=reward, cause=cause, report=report)

    @classmethod
    def policy_failed(cls, cause: Cause, detail: str = "") -> Verdict:
        return cls(kind=VerdictKind.POLICY_FAILED, reward=0.0, cause=cause, detail=detail)

    @classmethod
    def no_verdict(cls, cause: Cause, detail: str = "") -> Verdict:
        return cls(kind=VerdictKind.NO_VERDICT, cause=cause, detail=detail)
