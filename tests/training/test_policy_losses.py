"""The loss against an implementation with plain floats and loops."""

import math
import random

import pytest
import torch

from miles_core.training.importance import ImportanceSettings, importance_weights
from miles_core.training.kl import kl_estimate
from miles_core.training.losses import LossSettings, TokenData, policy_loss, token_weights

SIZES = [3, 5, 0, 2]
TIS = ImportanceSettings("tis", "token", high=1.2)


def plain_kl(logp: float, ref: float, kind: str) -> float:
    if kind == "k1":
        return logp - ref
    if kind == "k2":
        return 0.5 * (logp - ref) ** 2
    k3 = math.exp(ref - logp) - 1 - (ref - logp)
    return min(k3, 10.0) if kind == "low_var_kl" else k3


def plain_token(p: float, old: float, rollout: float, a: float, s: LossSettings) -> float:
    ratio = math.exp(p - old)
    held = min(max(ratio, 1 - s.eps_low), 1 + s.eps_high)
    gain = min(ratio * a, held * a)
    if s.dual_clip is not None and a < 0:
        gain = max(gain, s.dual_clip * a)
    return -gain * min(math.exp(old - rollout), TIS.high)


def batch(seed: int) -> tuple[list[list[tuple[float, ...]]], list[float]]:
    dice = random.Random(seed)
    rows = [[tuple(-3 * dice.random() for _ in range(4)) for _ in range(size)] for size in SIZES]
    return rows, [dice.uniform(-2, 2) for _ in SIZES]


def plain_loss(seed: int, s: LossSettings, aggregation: str) -> float:
    rows, advantages = batch(seed)
    sums = []
    for tokens, a in zip(rows, advantages, strict=True):
        values = [
            plain_token(p, old, rollout, a, s) + s.kl_coef * plain_kl(p, ref, s.kl_type)
            for p, old, rollout, ref in tokens
        ]
        sums.append(values)
    if aggregation == "token":
        return sum(map(sum, sums)) / sum(map(len, sums))
    return sum(sum(v) / max(1, len(v)) for v in sums) / len(sums)


@pytest.mark.parametrize("aggregation", ["trajectory", "token"])
@pytest.mark.parametrize(
    "settings",
    [
        LossSettings(0.2, 0.28, None, 0.0, "k1"),
        LossSettings(0.2, 0.28, None, 0.3, "low_var_kl"),
        LossSettings(0.2, 0.2, 1.5, 0.1, "k3"),
        LossSettings(0.1, 0.4, 3.0, 0.7, "k2"),
        LossSettings(0.1, 0.4, 3.0, 0.7, "k1"),
    ],
)
def test_loss_and_gradient_match_the_plain_one(settings: LossSettings, aggregation: str) -> None:
    for seed in range(4):
        rows, advantages = batch(seed)
        flat = torch.tensor([t for r in rows for t in r], dtype=torch.float64)
        weights = token_weights(aggregation, SIZES)  # type: ignore[arg-type]
        spread = [i for i, size in enumerate(SIZES) for _ in range(size)]
        logp = flat[:, 0].clone().requires_grad_()
        data = TokenData(
            advantages=torch.tensor([advantages[i] for i in spread], dtype=torch.float64),
            weights=torch.tensor([weights[i] for i in spread], dtype=torch.float64),
            old=flat[:, 1],
            ref=flat[:, 3],
            tis=importance_weights(flat[:, 1] - flat[:, 2], TIS),
        )
        loss, sums = policy_loss(logp, data, settings)
        assert loss.item() == pytest.approx(plain_loss(seed, settings, aggregation), rel=1e-9)
        assert sums["loss"].item() == loss.item()
        loss.backward()
        assert torch.isfinite(logp.grad).all() and logp.grad.abs().sum() > 0


def test_clip_takes_the_gradient_away_on_the_good_side_only() -> None:
    settings = LossSettings(0.2, 0.28)
    logp = torch.log(torch.tensor([1.5, 1.5, 0.5, 0.5])).requires_grad_()
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
    zeros, ones = torch.zeros(4), torch.ones(4)
    loss, sums = policy_loss(logp, TokenData(advantages, ones, zeros), settings)
    loss.backward()
    assert logp.grad.tolist() == pytest.approx([0.0, 1.5, -0.5, 0.0])
    assert [sums[f"pg_clipfrac{end}"].item() for end in ("", "_low", "_high")] == [2, 1, 1]


def test_low_var_kl_is_bounded() -> None:
    far = kl_estimate(torch.tensor([-100.0]), torch.tensor([0.0]), "low_var_kl")
    assert far.item() == 10.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("kl", ["k1", "k2", "k3", "low_var_kl"])
def test_a_value_that_is_not_finite_is_not_hidden(bad: float, kl: str) -> None:
    settings = LossSettings(0.2, 0.28, 3.0, 0.1, kl, True)  # type: ignore[arg-type]
    for name in ("log_probs", "advantages", "old", "ref", "tis", "sequence_log_ratio"):
        values = dict.fromkeys(("advantages", "weights", "old", "ref", "tis"), torch.ones(2))
        log_probs = torch.tensor([1.0, bad]) if name == "log_probs" else torch.ones(2)
        if name != "log_probs":
            values[name] = torch.tensor([1.0, bad])
        loss, _ = policy_loss(log_probs, TokenData(**values), settings)
        assert not torch.isfinite(loss), name


@pytest.mark.parametrize("mode", ["tis", "mis", "icepop"])
def test_importance_weights_of_what_is_not_finite_are_nan(mode: str) -> None:
    settings = ImportanceSettings(mode, "token", 0.5, 2.0)  # type: ignore[arg-type]
    log_rho = torch.tensor([0.0, 9.0, -9.0, float("nan"), float("inf"), float("-inf")])
    weights = importance_weights(log_rho, settings)
    assert weights[:3].tolist() == ([1.0, 2.0, 0.5] if mode == "tis" else [1.0, 0.0, 0.0])
    assert torch.isnan(weights[3:]).all()
