"""The main job from the command line to the trained model, with every real part in place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

MILES = Path(sys.executable).with_name("miles")
FLAGS = ("--num-rollout", "2", "--rollout-batch-size", "2", "--n-samples-per-prompt", "2")


@pytest.fixture(scope="module")
def whole(runs):
    process = runs.start("whole", *FLAGS, "--global-batch-size", "4")
    code = runs.finish(process)
    assert code == 0, runs.output("whole")[-3000:]
    return runs.directory / "whole"


def test_the_run_is_complete_and_says_so(runs, whole):
    status = runs.status("whole")
    assert status["state"] == "completed"
    assert (status["steps_done"], status["steps_total"]) == (2, 2)
    assert len(status["reward_mean"]) == 2
    assert sum(status["verdicts"].values()) == 8
    assert runs.output("whole").rstrip().endswith(str(whole))
    assert (runs.directory / "latest").resolve() == whole.resolve()


def test_each_part_left_what_the_run_directory_promises(runs, whole):
    for name in ("run.json", "config.json", "metrics.jsonl", "attempts/001/driver.log"):
        assert (whole / name).stat().st_size > 0
    assert sorted(p.name for p in (whole / "rollout_data").iterdir()) == ["0.pt", "1.pt"]
    assert (whole / "train_data" / "1" / "rank_0.pt").exists()
    assert (whole / "checkpoints" / "iter_0000002" / "MANIFEST.json").exists()
    assert (whole / "model" / "model.safetensors").exists()
    sources = {json.loads(line)["source"] for line in (whole / "metrics.jsonl").open()}
    assert sources == {"rollout", "train"}


def test_every_trained_token_is_the_engines_own(whole):
    command = [str(MILES), "verify", str(whole), "--json"]
    answer = subprocess.run(command, capture_output=True, check=True)
    report = json.loads(answer.stdout)
    assert report["problems"] == []
    assert report["trajectories"] == 8
    assert report["trained_tokens"] > 0


def test_what_the_trainer_computed_is_about_the_tokens_of_the_dump(whole):
    import torch

    for step in range(2):
        rollout = torch.load(whole / "rollout_data" / f"{step}.pt", weights_only=True)
        known = {
            (trajectory["trial_id"], index): sample
            for group in rollout["groups"]
            for trajectory in group["trajectories"]
            for index, sample in enumerate(trajectory["samples"])
        }
        trained = torch.load(whole / "train_data" / str(step) / "rank_0.pt", weights_only=True)
        records = trained["samples"]
        assert len(records) == len(known)
        for record in records:
            sample = known[record["trial_id"], record["sample_index"]]
            assert torch.equal(record["tokens"], sample["tokens"])
            assert torch.equal(record["rollout_logprobs"], sample["logprobs"])
            mask = sample["loss_mask"].bool()
            difference = (record["old_logprobs"] - sample["logprobs"])[mask]
            assert difference.abs().max() < 1e-3


def test_nothing_is_left_running(runs, whole):
    assert runs.left("whole") == []


def test_no_secret_is_in_the_logs_or_the_configuration(whole):
    secrets = json.loads((whole / "cluster" / "secrets.json").read_text())
    values = [value.encode() for value in secrets.values() if value]
    assert values
    for path in whole.rglob("*"):
        if path.is_file() and path.name != "secrets.json" and path.stat().st_size < 10_000_000:
            content = path.read_bytes()
            assert not any(value in content for value in values), path


def test_a_complete_run_started_again_trains_nothing(runs, whole):
    before = len(runs.events("whole", "step_trained"))
    assert runs.finish(runs.start("whole", *FLAGS, "--global-batch-size", "4")) == 0
    assert len(runs.events("whole", "step_trained")) == before


def test_the_ranks_ran_with_the_priority_of_everything_else(whole):
    ranks = json.loads((whole / "attempts" / "001" / "services" / "ranks.json").read_text())
    assert ranks["nice"] == [os.getpriority(os.PRIO_PROCESS, 0)]
