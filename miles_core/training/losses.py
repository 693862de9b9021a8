"""The policy loss over flat tensors of sampled tokens, in plain torch.

Every token carries a weight that holds the denominators of the whole batch, so a sum over any
partition of the tokens, on any number of ranks, is the same loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

KLType = Literal["k1", "k2", "k3", "low_var_kl"]
MAX_LOG_RATIO = 20.0
MAX_LOW_VAR_KL = 10.0


@dataclass(frozen=True)
class LossSettings:
    """Clip bounds, KL and truncated importance sampling; see TrainingConfig."""

    eps_low: float
    eps_high: float
    dual_clip: float | None
    kl_coef: float
    kl_type: KLType
    tis_clip: float | None


@dataclass
class TokenData:
    """N sampled tokens. `ref` and `rollout` are log-probabilities of the reference and engine."""

    advantages: torch.Tensor
    weights: torch.Tensor
    old: torch.Tensor
    rollout: torch.Tensor
    ref: torch.Tensor | None


def token_weights(
    aggregation: Literal["trajectory", "token"], trajectory_tokens: list[int]
) -> list[float]:
    """Weight of a sampled token of each trajectory, given the sampled tokens of all of a batch.

    "trajectory": mean per trajectory, then over trajectories: 1 / (G * S_r) with G trajectories
    (those without a sampled token count too). "token": 1 / sum(S_r).
    """
    if aggregation == "token":
        return [1.0 / max(1, sum(trajectory_tokens))] * len(trajectory_tokens)
    return [1.0 / (len(trajectory_tokens) * max(1, size)) for size in trajectory_tokens]


def kl_estimate(log_probs: torch.Tensor, ref: torch.Tensor, kind: KLType) -> torch.Tensor:
    """Per-token estimate of KL(policy || reference) with x = log_probs - ref.

    k1: x; k2: x^2 / 2; k3: exp(-x) - 1 + x (http://joschu.net/blog/kl-approx.html); low_var_kl:
    k3 with x held to +-20 in the exponent and the result to +-10.
    """
    x = log_probs - ref
    if kind == "k1":
        return x
    if kind == "k2":
        return x * x / 2
    if kind == "k3":
        return torch.exp(-x) - 1 + x
    bounded = (-x).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (bounded.exp() - 1 - bounded).clamp(-MAX_LOW_VAR_KL, MAX_LOW_VAR_KL)


def policy_terms(
    log_probs: torch.Tensor, data: TokenData, settings: LossSettings
) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss per token, 1 where the clip is active), both [N].

    With rho = exp(log_probs - old): max(-rho A, -clip(rho, 1 - low, 1 + high) A) (PPO, arXiv
    1707.06347; asymmetric bounds: DAPO, arXiv 2503.14476); where A < 0 at most -c A with a dual
    clip c (arXiv 1912.09729). TIS multiplies by min(exp(old - rollout), limit).
    """
    log_ratio = (log_probs - data.old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    plain = -ratio * data.advantages
    clipped = -ratio.clamp(1 - settings.eps_low, 1 + settings.eps_high) * data.advantages
    loss = torch.maximum(plain, clipped)
    if settings.dual_clip is not None:
        bounded = torch.minimum(loss, -settings.dual_clip * data.advantages)
        loss = torch.where(data.advantages < 0, bounded, loss)
    if settings.tis_clip is not None:
        loss = loss * importance_weights(data.old, data.rollout, settings.tis_clip)
    return loss, (clipped > plain).float()


def importance_weights(old: torch.Tensor, rollout: torch.Tensor, limit: float) -> torch.Tensor:
    """Truncated importance weights min(exp(old - rollout), limit) of the engine's samples."""
    return (old - rollout).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().clamp(max=limit)


def policy_loss(
    log_probs: torch.Tensor, data: TokenData, settings: LossSettings
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Weighted sum of the loss over the tokens, and sums of metrics (detached) with equal weights.

    A non-finite input gives a non-finite loss; nothing is replaced in silence.
    """
    terms, clipped = policy_terms(log_probs, data, settings)
    pg_loss = (terms * data.weights).sum()
    loss = pg_loss
    with torch.no_grad():
        log_ratio = log_probs - data.old
        sums = {
            "pg_loss": pg_loss.detach(),
            "clip_fraction": (clipped * data.weights).sum(),
            "ratio": (log_ratio.exp() * data.weights).sum(),
            "approx_kl": ((log_ratio.exp() - 1 - log_ratio) * data.weights).sum(),
        }
        if settings.tis_clip is not None:
            weights = importance_weights(data.old, data.rollout, settings.tis_clip)
            sums["tis_weight"] = (weights * data.weights).sum()
    if data.ref is not None:
        kl = (kl_estimate(log_probs, data.ref, settings.kl_type) * data.weights).sum()
        sums["kl_loss"] = kl.detach()
        loss = loss + settings.kl_coef * kl
    sums["loss"] = loss.detach()
    return loss, sums
