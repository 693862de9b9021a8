"""Whole runs of a model with experts under routing replay, and their continuation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from trained_again import trained_again

pytestmark = pytest.mark.slow

ENGINE, OLD = ("--use-rollout-routing-replay", "true"), ("--use-routing-replay", "true")
EP = ("--num-trainer-ranks", "2", "--expert-model-parallel-size", "2")
# Two optimizer steps for each step.
FLAGS = ("--global-batch-size", "8", "--rollout-max-response-len", "96", "--max-turns", "4")
SAME = ("loss", "grad_norm", "kl_loss", "entropy", "routing_replayed", "advantage_std")


@pytest.fixture(scope="session")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("moe") / "model"
    script = Path(__file__).with_name("moe_model.py")
    subprocess.run([sys.executable, str(script), str(out)], check=True, timeout=900)
    return out


def samples(path: Path) -> list[dict[str, Any]]:
    groups = torch.load(path, weights_only=True)["groups"]
    return [s for g in groups for t in g["trajectories"] for s in t["samples"]]


def told(path: Path) -> float:
    """The share of a step's tokens whose experts the engine has told."""
    rows = [sample["routed_experts"] for sample in samples(path)]
    tokens = sum(len(sample["tokens"]) for sample in samples(path))
    return sum(int((r >= 0).all(1).sum()) for r in rows) / tokens


@pytest.mark.parametrize(
    ("name", "flags"), [("engine", ENGINE), ("engine-ep", (*ENGINE, *EP)), ("old", OLD)]
)
def test_a_run_replays_its_routes_and_goes_on(runs, moe, name, flags):
    run = runs.directory / f"moe-{name}"
    flags = ("--hf-checkpoint", str(moe), *FLAGS, *flags)
    runs.complete(run.name, *flags, "--num-rollout", "2")
    report = runs.miles("verify", str(run))
    assert report["problems"] == [] and report["trained_tokens"] > 0
    runs.complete(run.name, *flags, "--num-rollout", "3")
    assert [e["from_step"] for e in runs.events(run.name, "run_started")] == [0, 2]
    trained = runs.trained(run.name)
    assert [metrics["step"] for metrics in trained] == [0, 1, 2]
    assert any(metrics["advantage_std"] > 0 for metrics in trained), "nothing was learned"
    for metrics in trained:
        assert metrics["optimizer_steps"] == 2
        assert metrics["grad_norm"] > 1e-3 or metrics["advantage_std"] == 0
        assert metrics["train_rollout_logprob_abs_diff"] < 1e-5
        assert metrics["train_rollout_logprob_abs_diff_max"] < 1e-3
        if name == "old":
            assert metrics["routing_replayed"] == 1.0
            assert "rollout_routing_differs" not in metrics
        else:
            told_by_engine = told(run / "rollout_data" / f"{metrics['step']}.pt")
            assert metrics["routing_replayed"] == pytest.approx(told_by_engine, rel=1e-6)
            assert 0.98 < told_by_engine < 1
            assert metrics["rollout_routing_differs"] < 1e-3
    for here, again in zip(trained, trained_again(run, 3), strict=True):
        for metric in SAME:
            assert here[metric] == pytest.approx(again[metric], rel=1e-4, abs=1e-6), metric


def test_the_trainer_follows_the_routes_that_the_engine_tells(runs, moe):
    """Other routes in a run's rollout give other log-probabilities."""
    run = runs.directory / "moe-engine"
    if not (run / "model").is_dir():
        runs.complete(run.name, "--hf-checkpoint", str(moe), *FLAGS, *ENGINE, "--num-rollout", "2")
    path = run / "rollout_data" / "0.pt"
    content = torch.load(path, weights_only=True)
    for group in content["groups"]:
        for trajectory in group["trajectories"]:
            for sample in trajectory["samples"]:
                sample["routed_experts"] = (sample["routed_experts"] + 1) % 4
    before = path.read_bytes()
    torch.save(content, path)
    try:
        (metrics,) = trained_again(run, 1)
    finally:
        path.write_bytes(before)
    assert metrics["rollout_routing_differs"] > 0.3
    assert metrics["train_rollout_logprob_abs_diff_max"] > 0.1
