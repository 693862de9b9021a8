"""What is known of one task: its state, why, and what the checks measured."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

CHECKS_VERSION = 2
"""Goes up when the checks, or what a sandbox lets an agent do, change: all tasks are checked
again then."""


class State(StrEnum):
    """What the checks say of a task."""

    ADMITTED = "admitted"
    UNPROVEN = "unproven"
    """It has no solution, so nothing shows that full reward can be reached."""
    UNSUPPORTED = "unsupported"
    """The sandbox cannot run it; another kind may."""
    FAILED = "failed"
    UNDECIDED = "undecided"
    """The sandbox or the server failed, which says nothing of the task; never cached."""


class Trial(BaseModel):
    """What one trial of a check ended with; `seconds` by phase, `total` among them."""

    model_config = ConfigDict(extra="forbid")

    reward: float | None
    cause: str | None = None
    detail: str = ""
    seconds: dict[str, float] = Field(default_factory=dict)


class TaskReport(BaseModel):
    """The result of the checks of one task; what was not looked at is None.

    `forged_reward_survives` says that a reward which the agent wrote became the trial's,
    `solution_hidden` that neither tests nor solution were found in the sandbox. `disk_bytes` (in
    the writable layers) and `memory_peak_bytes` are those of the trial that used most.
    """

    model_config = ConfigDict(extra="forbid")

    task: str
    state: State
    reasons: list[str] = Field(default_factory=list)
    fixes: list[str] = Field(default_factory=list)
    notes: list[str] = Field(default_factory=list)
    oracle: Trial | None = None
    nop: Trial | None = None
    forged_reward_survives: bool | None = None
    solution_hidden: bool | None = None
    findings: list[str] = Field(default_factory=list)
    seconds: float = 0.0
    disk_bytes: int | None = None
    memory_peak_bytes: int | None = None
    digest: str | None = None
    checked_at: float | None = Field(None, description="Seconds since 1970")
    cached: bool = False

    @model_validator(mode="after")
    def _each_reason_has_a_fix(self) -> TaskReport:
        if len(self.reasons) != len(self.fixes):
            raise ValueError(f"{len(self.reasons)} reasons with {len(self.fixes)} fixes")
        return self

    @property
    def reason(self) -> str:
        """All reasons in one line."""
        return "; ".join(self.reasons)

    @property
    def fix(self) -> str:
        """What to do, in one line."""
        return "; ".join(dict.fromkeys(self.fixes))

    def to_json(self) -> dict[str, Any]:
        """The object that `miles tasks check --json` prints for a task."""
        return self.model_dump(mode="json")
