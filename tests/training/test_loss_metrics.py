"""Metrics of a step against sums over its tokens."""

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from loss_published import published_step, tokens_of
from loss_table import Case, make_case, run_step, split

from miles_core.modeling import parallel
from miles_core.training.config import TrainerConfig

CONFIG = TrainerConfig(global_batch_size=3, kl_loss_coef=0.0, max_tokens_per_gpu=12)


@pytest.fixture(scope="module", autouse=True)
def layout() -> Iterator[parallel.Layout]:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield parallel.start(0, 1, "127.0.0.1", 0, 1, seed=1)
    parallel.stop()
    torch.set_default_dtype(default)


def recorded(case: Case) -> tuple[list[float], list[float], list[float]]:
    """Old and engine log-probabilities and entropies of all sampled tokens."""
    count = range(len(case.rewards))
    pairs = [tokens_of(case, case.logits, i) for i in count]
    rollout = [s["rollout"][s["mask"]] for t in case.sequences for s in t]
    return (
        torch.cat([old for old, _ in pairs]).tolist(),
        torch.cat(rollout).tolist(),
        torch.cat([entropy for _, entropy in pairs]).tolist(),
    )


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def test_mismatch_entropy_and_advantages(layout: parallel.Layout) -> None:
    case = make_case(1)
    _, metrics, _ = run_step(case, CONFIG, layout)
    old, rollout, entropy = recorded(case)
    x = [o - r for o, r in zip(old, rollout, strict=True)]
    advantages = torch.cat(published_step(case, CONFIG).advantages)
    want = {
        "train_rollout_logprob_abs_diff": mean([abs(v) for v in x]),
        "train_rollout_logprob_abs_diff_max": max(abs(v) for v in x),
        "train_rollout_kl": mean([math.exp(v) - 1 - v for v in x]),
        "train_rollout_kl_reverse": mean([v * math.exp(v) - math.exp(v) + 1 for v in x]),
        "entropy": mean(entropy),
        "trained_tokens": len(x),
        "advantage_mean": advantages.mean().item(),
        "advantage_std": advantages.std().item(),
        "reward_mean": mean(case.rewards),
        "reward_std": torch.tensor(case.rewards).std().item(),
        "frac_reward_zero_std": 0.0,
        "trajectories": 9,
        "samples": sum(len(t) for t in case.sequences),
        "optimizer_steps": 3,
    }
    for name, value in want.items():
        assert metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_mismatch_that_is_not_finite_shows(layout: parallel.Layout, bad: float) -> None:
    case = make_case(1)
    sequence = case.sequences[4][0]
    sequence["rollout"][sequence["mask"]] = bad
    metrics = run_step(case, CONFIG, layout)[1]
    for name in ("train_rollout_logprob_abs_diff", "train_rollout_logprob_abs_diff_max"):
        assert not math.isfinite(metrics[name]), name


def test_the_divergences_are_those_of_the_distributions() -> None:
    """Over samples of the engine both estimates tend to the divergence that they are named for."""
    dice = torch.Generator().manual_seed(0)
    engine, trainer = (torch.randn(6, generator=dice).log_softmax(-1) for _ in range(2))
    x = (trainer - engine)[torch.multinomial(engine.exp(), 400_000, True, generator=dice)]
    forward = (engine.exp() * (engine - trainer)).sum().item()
    reverse = (trainer.exp() * (trainer - engine)).sum().item()
    assert (x.exp() - 1 - x).mean().item() == pytest.approx(forward, rel=0.03)
    assert (x * x.exp() - x.exp() + 1).mean().item() == pytest.approx(reverse, rel=0.03)
    assert abs(forward - reverse) > 0.1 * forward


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("mode", ["tis", "mis"])
def test_importance_weights(layout: parallel.Layout, mode: str, level: str) -> None:
    config = replace(CONFIG, use_tis=True, tis_mode=mode, tis_level=level, tis_clip=1.1)
    case = make_case(0)
    for cut in (case, split(case)):
        _, metrics, step = run_step(cut, config, layout)
        weights = torch.cat(published_step(case, config).importance)
        assert metrics["tis"] == pytest.approx(weights.mean().item(), rel=1e-6)
        assert metrics["tis_abs"] == pytest.approx((weights - 1).abs().mean().item(), rel=1e-6)
        limit = 0.0 if mode == "mis" else 1.1
        at_limit = ((weights - limit).abs() < 1e-12).double().mean().item()
        assert metrics["tis_clipfrac"] == pytest.approx(at_limit) and at_limit > 0
        for sample in step.own_samples:
            assert sample.tis is not None and not sample.tis[~sample.mask].any()


@pytest.mark.parametrize("aggregation", ["trajectory", "token", "constant"])
def test_means_do_not_depend_on_the_scale_of_the_weights(
    layout: parallel.Layout, aggregation: str
) -> None:
    """The first step is on the policy itself: ratio 1, nothing clipped, no divergence."""
    constant = 3 if aggregation == "constant" else None
    config = replace(
        CONFIG,
        global_batch_size=9,
        loss_aggregation=aggregation,
        loss_constant_length=constant,
        eps_clip_c=3.0,
    )
    metrics = run_step(make_case(2), config, layout)[1]
    assert metrics["ratio"] == pytest.approx(1.0)
    for name in ("ppo_kl", "ppo_kl_k3", "pg_clipfrac", "pg_clipfrac_dual"):
        assert metrics[name] == pytest.approx(0.0, abs=1e-12), name
    later = run_step(make_case(0), replace(config, global_batch_size=3), layout)[1]
    assert 0 < later["pg_clipfrac"] <= 1 and later["ppo_kl_k3"] > 0 and later["ppo_kl"] != 0
    sides = later["pg_clipfrac_low"] + later["pg_clipfrac_high"]
    assert later["pg_clipfrac"] == pytest.approx(sides)


def test_metrics_of_options_are_there_with_the_option_alone(layout: parallel.Layout) -> None:
    optional = {
        "kl_loss": {"kl_loss_coef": 0.1},
        "reward_kl": {"kl_coef": 0.1},
        "entropy_loss": {"entropy_coef": 0.1},
        "pg_clipfrac_dual": {"eps_clip_c": 3.0},
        "tis": {"use_tis": True},
    }
    plain = run_step(make_case(0), CONFIG, layout)[1]
    for name, changes in optional.items():
        assert name not in plain
        assert name in run_step(make_case(0), replace(CONFIG, **changes), layout)[1]  # type: ignore[arg-type]


def test_kl_in_the_reward_is_reported_per_token(layout: parallel.Layout) -> None:
    case = make_case(3)
    for kind in ("k1", "k2"):
        config = replace(CONFIG, kl_coef=0.25, kl_loss_type=kind)
        metrics = run_step(case, config, layout)[1]
        old = torch.cat([tokens_of(case, case.logits, i)[0] for i in range(9)])
        ref = torch.cat([tokens_of(case, case.ref_logits, i)[0] for i in range(9)])
        want = (old - ref) if kind == "k1" else (old - ref) ** 2 / 2
        assert metrics["reward_kl"] == pytest.approx(want.mean().item(), rel=1e-6)


def test_groups_without_spread_are_counted(layout: parallel.Layout) -> None:
    case = make_case(0)
    case.rewards[3] = case.rewards[4] = 0.5
    policy, metrics, _ = run_step(case, replace(CONFIG, global_batch_size=9), layout)
    assert metrics["frac_reward_zero_std"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("estimator", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_advantages_normalised_over_the_step(layout: parallel.Layout, estimator: str) -> None:
    config = replace(CONFIG, advantage_estimator=estimator, kl_coef=0.1)
    metrics = run_step(make_case(0), config, layout)[1]
    assert metrics["advantage_mean"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["advantage_std"] == pytest.approx(1.0, abs=1e-5)
