"""A whole run of PPO over two tensor-parallel ranks, whose critic starts from another model."""

from __future__ import annotations

from pathlib import Path

import pytest
from trained_again import trained_again

from miles_core.checkpoints.convert import convert_to_torch_dist
from miles_core.modelinit.init import init_model

pytestmark = pytest.mark.slow

FLAGS = ("--advantage-estimator", "ppo", "--critic-lr", "1e-3", "--global-batch-size", "8")
TP = ("--num-trainer-ranks", "2", "--tensor-model-parallel-size", "2")
SAME = (
    "loss",
    "grad_norm",
    "entropy",
    "kl_loss",
    "value_loss",
    "value_mean",
    "return_mean",
    "critic_grad_norm",
)


@pytest.fixture(scope="module")
def critic(runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of another seed, converted."""
    folder = tmp_path_factory.mktemp("critic")
    recipe = folder / "other.toml"
    recipe.write_text(runs.recipe.read_text().replace("seed = 0", "seed = 1"))
    init_model(recipe, folder / "hf")
    convert_to_torch_dist(folder / "hf", folder / "torch_dist")
    return folder / "torch_dist"


def test_policy_and_critic_are_trained_and_go_on_as_one_process_would(runs, critic):
    run = runs.directory / "ppo"
    flags = (*FLAGS, *TP, "--critic-load", str(critic))
    runs.complete("ppo", *flags, "--num-rollout", "2")
    runs.complete("ppo", *flags, "--num-rollout", "3")
    assert [e["from_step"] for e in runs.events("ppo", "run_started")] == [0, 2]
    assert runs.miles("verify", str(run))["problems"] == []
    held = runs.miles("checkpoint", "inspect", str(run / "checkpoints"))
    names = {section["name"] for section in held["sections"]}
    assert {"model", "optimizer", "critic", "critic.optimizer"} <= names
    trained = runs.trained("ppo")
    assert [metrics["step"] for metrics in trained] == [0, 1, 2]
    for here, again in zip(trained, trained_again(run, 3), strict=True):
        assert here["optimizer_steps"] == here["critic_optimizer_steps"] == 2
        assert here["grad_norm"] > 0 and here["critic_grad_norm"] > 0
        for metric in SAME:
            assert here[metric] == pytest.approx(again[metric], rel=1e-4, abs=1e-6), metric
    (of_the_policy,) = trained_again(run, 1, critic_load=None)
    assert abs(trained[0]["value_mean"] - of_the_policy["value_mean"]) > 1e-3
