"""The replay finds every kind of drift between a dump and the engine's record."""

from __future__ import annotations

import copy

import orjson
import pytest
import torch

from miles_core.rollout.replay import replay
from miles_core.runs.directory import RunDir

RECORD = {
    "rid": "r1",
    "weight_version": "3",
    "input_len": 2,
    "output_ids": [7, 8, 9],
    "output_logprobs": [-0.1, -0.2, -0.3],
    "finish_reason": {"type": "stop"},
}


def write(tmp_path, change=lambda sample: None, records=(RECORD,)) -> RunDir:
    run = RunDir(tmp_path)
    sample = {
        "tokens": torch.tensor([1, 2, 7, 8, 9, 4]),
        "loss_mask": torch.tensor([0, 0, 1, 1, 1, 0], dtype=torch.uint8),
        "logprobs": torch.tensor([0, 0, -0.1, -0.2, -0.3, 0], dtype=torch.float32),
        "turns": [
            {"rid": "r1", "start": 2, "end": 5, "weight_version": 3, "finish_reason": "stop"}
        ],
    }
    change(sample)
    run.rollout_data.mkdir(parents=True, exist_ok=True)
    run.engine_log.mkdir(exist_ok=True)
    trajectory = {"trial_id": "t", "reward": 1.0, "verdict": {}, "samples": [sample]}
    group = {"group_id": "g", "instance_id": "i", "trajectories": [trajectory]}
    data = {"step": 0, "weight_version": 3, "rows": ["i"], "groups": [group]}
    torch.save(data, run.rollout_path(0))
    log = run.engine_log / "generations-1.jsonl"
    log.write_bytes(b"".join(orjson.dumps(r) + b"\n" for r in records) + b'{"rid": "torn')
    return run


def test_an_exact_dump_has_no_problems(tmp_path):
    report = replay(write(tmp_path))
    assert report.problems == []
    assert (report.steps, report.trajectories, report.trained_tokens) == (1, 1, 3)


def _token(sample):
    sample["tokens"][3] = 5


def _logprob(sample):
    sample["logprobs"][3] += 1e-4


def _stray(sample):
    sample["loss_mask"][5] = 1


def _span(sample):
    sample["turns"][0]["end"] = 4


def _version(sample):
    sample["turns"][0]["weight_version"] = 4


@pytest.mark.parametrize("change", [_token, _logprob, _stray, _span, _version])
def test_each_kind_of_drift_is_found(tmp_path, change):
    assert replay(write(tmp_path, change)).problems


def test_a_generation_without_a_record_is_found(tmp_path):
    other = {**copy.deepcopy(RECORD), "rid": "r2"}
    assert "no record" in replay(write(tmp_path, records=(other,))).problems[0]
