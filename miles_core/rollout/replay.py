"""Replay of a run's dumps against the engine's own record: is every trained token exact?"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from miles_core.rollout.dump import read_rollout
from miles_core.runs.directory import RunDir


@dataclass
class ReplayReport:
    """What a replay found. `problems` names step, trial and token; empty when all is exact."""

    steps: int = 0
    trajectories: int = 0
    trained_tokens: int = 0
    problems: list[str] = field(default_factory=list)


def engine_records(directory: Path) -> dict[str, dict[str, Any]]:
    """The engines' finished generations by request id; a torn last line is ignored."""
    records: dict[str, dict[str, Any]] = {}
    for path in sorted(directory.glob("generations-*.jsonl")):
        for line in path.read_bytes().split(b"\n"):
            if line.endswith(b"}"):
                record = orjson.loads(line)
                records[record["rid"]] = record
    return records


def replay(run: RunDir) -> ReplayReport:
    """Look up every trained token of every dump in the engine's records.

    The id must be equal, the log-probability equal as float32, and a token may be trained on
    only if it lies in a turn that the engine sampled.
    """
    records = engine_records(run.engine_log)
    report = ReplayReport()
    for path in sorted(run.rollout_data.glob("*.pt"), key=lambda p: int(p.stem)):
        data = read_rollout(path)
        report.steps += 1
        for group in data["groups"]:
            for trajectory in group["trajectories"]:
                report.trajectories += 1
                where = f"step {data['step']}, trial {trajectory['trial_id']}"
                for sample in trajectory["samples"]:
                    _replay_sample(sample, records, where, report)
    return report


def _replay_sample(
    sample: dict[str, Any], records: dict[str, dict[str, Any]], where: str, report: ReplayReport
) -> None:
    import torch

    mask = sample["loss_mask"].bool()
    report.trained_tokens += int(mask.sum())
    covered = torch.zeros_like(mask)
    for turn in sample["turns"]:
        start, end = turn["start"], turn["end"]
        covered[start:end] = True
        record = records.get(turn["rid"])
        if record is None:
            report.problems.append(f"{where}: the engine has no record of request {turn['rid']}")
            continue
        ids = torch.tensor(record["output_ids"], dtype=torch.int64)
        logprobs = torch.tensor(record["output_logprobs"], dtype=torch.float32)
        if not torch.equal(sample["tokens"][start:end], ids):
            report.problems.append(f"{where}: ids of request {turn['rid']} differ")
        # A shared prefix is trained once, so only the trained part carries log-probabilities.
        trained = mask[start:end]
        same = ids.shape == trained.shape and torch.equal(
            sample["logprobs"][start:end][trained], logprobs[trained]
        )
        if not same:
            report.problems.append(f"{where}: log-probabilities of request {turn['rid']} differ")
        if int(record["weight_version"]) != int(turn["weight_version"]):
            report.problems.append(f"{where}: weight version of request {turn['rid']} differs")
    stray = mask & ~covered
    if bool(stray.any()):
        first = int(stray.nonzero()[0])
        report.problems.append(f"{where}: token {first} is trained on but was not sampled")
