"""Whole steps of every variant against the published formulas: losses and gradients."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loss_published import published_step
from loss_table import TableCritic, make_case, run_step, split

from miles_core.modeling import parallel
from miles_core.training.config import TrainerConfig

BASE = TrainerConfig(global_batch_size=3, kl_loss_coef=0.0, max_tokens_per_gpu=12)
VARIANTS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "grpo without std": {"grpo_std_normalization": False},
    "dapo": {"loss_aggregation": "token", "eps_clip_high": 0.4},
    "dr_grpo": {
        "loss_aggregation": "constant",
        "loss_constant_length": 11,
        "grpo_std_normalization": False,
    },
    "dual clip": {"eps_clip_c": 1.1},
    "gspo": {"advantage_estimator": "gspo", "eps_clip": 0.03, "eps_clip_high": 0.04},
    "gspo per token": {"advantage_estimator": "gspo", "loss_aggregation": "token"},
    "gspo with dual clip": {"advantage_estimator": "gspo", "eps_clip_c": 1.05, "eps_clip": 0.02},
    "rloo": {"advantage_estimator": "rloo"},
    "rloo with kl": {"advantage_estimator": "rloo", "kl_coef": 0.2, "kl_loss_type": "k1"},
    "grpo with kl in the reward": {"kl_coef": 0.3, "kl_loss_type": "k3"},
    "gspo with kl in the reward": {
        "advantage_estimator": "gspo",
        "kl_coef": 0.3,
        "kl_loss_type": "k2",
    },
    "reinforce++": {"advantage_estimator": "reinforce_plus_plus"},
    "reinforce++ with kl": {
        "advantage_estimator": "reinforce_plus_plus",
        "kl_coef": 0.1,
        "kl_loss_type": "k1",
    },
    "reinforce++ baseline": {"advantage_estimator": "reinforce_plus_plus_baseline"},
    "reinforce++ baseline with kl": {
        "advantage_estimator": "reinforce_plus_plus_baseline",
        "kl_coef": 0.1,
        "kl_loss_type": "k2",
    },
    "k1 loss": {"kl_loss_coef": 0.2, "kl_loss_type": "k1"},
    "k2 loss": {"kl_loss_coef": 0.2, "kl_loss_type": "k2"},
    "k3 loss": {"kl_loss_coef": 0.2, "kl_loss_type": "k3"},
    "low_var_kl loss": {"kl_loss_coef": 0.2, "kl_loss_type": "low_var_kl"},
    "unbiased k1": {"kl_loss_coef": 0.2, "kl_loss_type": "k1", "use_unbiased_kl": True},
    "unbiased k3": {"kl_loss_coef": 0.2, "kl_loss_type": "k3", "use_unbiased_kl": True},
    "gspo, unbiased k3": {
        "advantage_estimator": "gspo",
        "kl_loss_coef": 0.2,
        "kl_loss_type": "k3",
        "use_unbiased_kl": True,
    },
    "entropy": {"entropy_coef": 0.3},
    "entropy per token": {"entropy_coef": 0.3, "loss_aggregation": "token"},
    "tis": {"use_tis": True, "tis_clip": 1.2},
    "tis on both sides": {"use_tis": True, "tis_clip": 1.2, "tis_clip_low": 0.9},
    "tis of the sequence": {"use_tis": True, "tis_clip": 1.5, "tis_level": "sequence"},
    "tis, geometric": {"use_tis": True, "tis_clip": 1.1, "tis_level": "geometric"},
    "mis": {"use_tis": True, "tis_mode": "mis", "tis_clip": 1.2},
    "mis of the sequence": {
        "use_tis": True,
        "tis_mode": "mis",
        "tis_level": "sequence",
        "tis_clip": 1.4,
    },
    "mis, geometric": {
        "use_tis": True,
        "tis_mode": "mis",
        "tis_level": "geometric",
        "tis_clip": 1.2,
        "tis_clip_low": 0.8,
    },
    "icepop": {"use_tis": True, "tis_mode": "icepop", "tis_clip": 1.3, "tis_clip_low": 0.8},
    "ppo": {"advantage_estimator": "ppo"},
    "ppo with gae": {"advantage_estimator": "ppo", "gamma": 0.97, "lambd": 0.9},
    "ppo as it is": {"advantage_estimator": "ppo", "lambd": 0.5, "normalize_advantages": False},
    "ppo, one step ahead": {"advantage_estimator": "ppo", "gamma": 0.9, "lambd": 0.0},
    "ppo with kl in the reward": {
        "advantage_estimator": "ppo",
        "lambd": 0.95,
        "kl_coef": 0.2,
        "kl_loss_type": "k1",
        "value_clip": 0.05,
    },
    "ppo per token": {
        "advantage_estimator": "ppo",
        "lambd": 0.8,
        "value_clip": 0.02,
        "loss_aggregation": "token",
        "kl_loss_coef": 0.1,
    },
    "ppo, constant": {
        "advantage_estimator": "ppo",
        "loss_aggregation": "constant",
        "loss_constant_length": 11,
        "eps_clip_c": 1.5,
    },
    "ppo with the engine's log-probabilities": {
        "advantage_estimator": "ppo",
        "use_rollout_logprobs": True,
        "lambd": 0.95,
        "kl_coef": 0.1,
    },
    "grpo with the engine's log-probabilities": {"use_rollout_logprobs": True},
    "gspo with the engine's log-probabilities": {
        "advantage_estimator": "gspo",
        "use_rollout_logprobs": True,
        "eps_clip": 0.03,
    },
    "gspo with mis, kl and entropy": {
        "advantage_estimator": "gspo",
        "use_tis": True,
        "tis_mode": "mis",
        "tis_level": "geometric",
        "tis_clip": 1.1,
        "kl_loss_coef": 0.1,
        "entropy_coef": 0.05,
        "loss_aggregation": "token",
    },
}


@pytest.fixture(scope="module", autouse=True)
def layout() -> Iterator[parallel.Layout]:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield parallel.start(0, 1, "127.0.0.1", 0, 1, seed=1)
    parallel.stop()
    torch.set_default_dtype(default)


def assert_equals_published(case: Any, config: TrainerConfig, layout: Any, published: Any) -> None:
    critic = TableCritic(case, config) if config.advantage_estimator == "ppo" else None
    policy, _, step = run_step(case, config, layout, critic)
    assert_same(policy, published.losses, published.gradients)
    if critic is not None:
        assert_same(critic, published.value_losses, published.value_gradients)


def assert_same(table: Any, losses: list[float], gradients: list[torch.Tensor]) -> None:
    assert table.losses == pytest.approx(losses, rel=1e-6, abs=1e-6)
    for got, want in zip(table.gradients, gradients, strict=True):
        assert torch.allclose(got, want, rtol=1e-6, atol=1e-7), (got - want).abs().max()


@pytest.mark.parametrize("name", VARIANTS)
def test_losses_and_gradients_are_the_published_ones(name: str, layout: parallel.Layout) -> None:
    config = replace(BASE, **VARIANTS[name])
    for seed in range(3):
        case = make_case(seed)
        published = published_step(case, config)
        assert len(published.losses) == 3 and all(g.abs().sum() > 0 for g in published.gradients)
        assert_equals_published(case, config, layout, published)


@pytest.mark.parametrize("name", [n for n in VARIANTS if n != "grpo"])
def test_every_variant_has_an_effect(name: str) -> None:
    plain, other = (
        [published_step(make_case(seed), c) for seed in range(3)]
        for c in (BASE, replace(BASE, **VARIANTS[name]))
    )
    assert any(
        not torch.allclose(x, y, atol=1e-4)
        for a, b in zip(plain, other, strict=True)
        for x, y in zip(a.gradients, b.gradients, strict=True)
    )


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(
    name=st.sampled_from(sorted(VARIANTS)),
    seed=st.integers(0, 1000),
    cut=st.integers(1, 6),
    max_tokens=st.integers(9, 200),
    global_batch_size=st.sampled_from([1, 3, 9]),
)
def test_samples_and_micro_batches_do_not_matter(
    layout: parallel.Layout,
    name: str,
    seed: int,
    cut: int,
    max_tokens: int,
    global_batch_size: int,
) -> None:
    """Whole or cut trajectories, in micro-batches of one sample or of all of them."""
    config = replace(BASE, global_batch_size=global_batch_size, **VARIANTS[name])
    case = make_case(seed)
    published = published_step(case, config)
    changed = replace(config, max_tokens_per_gpu=max_tokens)
    assert_equals_published(split(case, cut), changed, layout, published)
    assert_equals_published(case, changed, layout, published)
