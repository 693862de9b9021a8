"""A finished trial as the run keeps it: verdict, samples, times, in one file."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson

from miles_core.runs.files import write_atomic
from miles_core.verdicts import Verdict

FILE_NAME = "trajectory.json"


@dataclass(frozen=True)
class Place:
    """A member's place in a group: what is tried again when a trial has no verdict."""

    step: int
    group_id: str
    member: int
    instance_id: str


@dataclass
class Trajectory:
    """One ended trial.

    Each sample is a dict with `tokens`, `loss_mask` and `logprobs` (lists of equal length, one
    entry for each token) and `turns` (the spans that the engine sampled). `session` is what the
    session server tells beside them: retries, tool lists, fields that nobody honoured.
    """

    trial_id: str
    place: Place
    attempt: int
    verdict: Verdict
    samples: list[dict[str, Any]] = field(default_factory=list)
    agent_metrics: dict[str, Any] = field(default_factory=dict)
    exit_status: str = ""
    model_calls: int = 0
    session: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def trained_tokens(self) -> int:
        """Number of sampled tokens over all samples."""
        return sum(sum(sample["loss_mask"]) for sample in self.samples)

    def save(self, trials_dir: Path) -> None:
        """Write `trials_dir/<trial id>/trajectory.json`, whole or not at all."""
        record = asdict(self)
        record["verdict"] = self.verdict.model_dump(mode="json")
        write_atomic(trials_dir / self.trial_id / FILE_NAME, orjson.dumps(record))

    @classmethod
    def load(cls, path: Path) -> Trajectory:
        """Read a file that `save` wrote."""
        record = orjson.loads(path.read_bytes())
        record["place"] = Place(**record["place"])
        record["verdict"] = Verdict.model_validate(record["verdict"])
        return cls(**record)


def finished_trials(trials_dir: Path, step: int) -> dict[Place, Trajectory]:
    """Trainable trajectories of a step that ended before a restart, by their place."""
    found: dict[Place, Trajectory] = {}
    for path in sorted(trials_dir.glob(f"s{step:04d}-*/{FILE_NAME}")):
        trajectory = Trajectory.load(path)
        if trajectory.place.step == step and trajectory.verdict.trainable and trajectory.samples:
            found[trajectory.place] = trajectory
    return found
