"""The policy loss over flat tensors of sampled tokens, in plain torch.

Every token carries a weight that holds the denominators of the whole batch, so a sum over any
partition of the tokens, on any number of ranks, is the same loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from miles_core.training.kl import KLType, bounded_exp, kl_estimate

Aggregation = Literal["trajectory", "token", "constant"]
PARTS = ("loss", "pg_loss", "kl_loss", "entropy_loss")
MEANS = (
    "pg_clipfrac",
    "pg_clipfrac_low",
    "pg_clipfrac_high",
    "pg_clipfrac_dual",
    "ratio",
    "ppo_kl",
    "ppo_kl_k3",
)
LOSS_NAMES = PARTS + MEANS
"""The sums of `policy_loss`; those of MEANS are means when divided by the sum of all weights."""


@dataclass(frozen=True)
class LossSettings:
    """Clip bounds, KL to the reference and entropy bonus; see TrainingConfig."""

    eps_low: float
    eps_high: float
    dual_clip: float | None = None
    kl_coef: float = 0.0
    kl_type: KLType = "low_var_kl"
    unbiased_kl: bool = False
    entropy_coef: float = 0.0


@dataclass
class TokenData:
    """N sampled tokens, each field [N].

    `old` and `ref` are log-probabilities, `tis` importance weights, `sequence_log_ratio` the mean
    of log_probs - old over the token's trajectory (then the ratio is that of the sequence),
    `entropy` that of the distribution which the token was drawn from, with gradients.
    """

    advantages: torch.Tensor
    weights: torch.Tensor
    old: torch.Tensor
    ref: torch.Tensor | None = None
    tis: torch.Tensor | None = None
    sequence_log_ratio: torch.Tensor | None = None
    entropy: torch.Tensor | None = None


def token_weights(
    aggregation: Aggregation, trajectory_tokens: list[int], constant: int | None = None
) -> list[float]:
    """Weight of a sampled token of each trajectory, given the sampled tokens of all of a batch.

    "trajectory": mean per trajectory, then over trajectories: 1 / (G * S_r) with G trajectories
    (those without a sampled token count too; GRPO, arXiv 2402.03300). "token": 1 / sum(S_r)
    (DAPO, arXiv 2503.14476). "constant": 1 / (G * constant) (Dr. GRPO, arXiv 2503.20783).
    """
    count = len(trajectory_tokens)
    if aggregation == "token":
        return [1.0 / max(1, sum(trajectory_tokens))] * count
    if aggregation == "constant":
        assert constant is not None
        return [1.0 / (count * constant)] * count
    return [1.0 / (count * max(1, size)) for size in trajectory_tokens]


def log_ratios(log_probs: torch.Tensor, data: TokenData) -> torch.Tensor:
    """log rho [N]: of each token, or of its sequence (GSPO, arXiv 2507.18071, equation 14).

    There the value is that of the whole trajectory and the gradient goes through the token. With
    weights of 1 / (G * S_r) the sum over a trajectory is the loss and gradient of GSPO's sequence
    ratio, wherever the tokens of the trajectory are.
    """
    if data.sequence_log_ratio is None:
        return log_probs - data.old
    return data.sequence_log_ratio + (log_probs - log_probs.detach())


@dataclass
class PolicyTerms:
    """Per token: the loss, the ratio, and where the clip and the dual clip are active."""

    loss: torch.Tensor
    ratio: torch.Tensor
    clipped: torch.Tensor
    dual_clipped: torch.Tensor


def policy_terms(log_probs: torch.Tensor, data: TokenData, settings: LossSettings) -> PolicyTerms:
    """max(-rho A, -clip(rho, 1 - low, 1 + high) A) with rho = exp(log_probs - old) (PPO, arXiv
    1707.06347; asymmetric bounds: DAPO, arXiv 2503.14476); where A < 0 at most -c A with a dual
    clip c (arXiv 1912.09729). Importance weights, which are constants, multiply it.
    """
    ratio = bounded_exp(log_ratios(log_probs, data))
    plain = -ratio * data.advantages
    held = -ratio.clamp(1 - settings.eps_low, 1 + settings.eps_high) * data.advantages
    loss = torch.maximum(plain, held)
    dual_clipped = torch.zeros_like(loss, dtype=torch.bool)
    if settings.dual_clip is not None:
        limit = -settings.dual_clip * data.advantages
        dual_clipped = (data.advantages < 0) & (loss > limit)
        loss = torch.where(data.advantages < 0, torch.minimum(loss, limit), loss)
    if data.tis is not None:
        loss = loss * data.tis
    return PolicyTerms(loss, ratio, held > plain, dual_clipped)


def policy_loss(
    log_probs: torch.Tensor, data: TokenData, settings: LossSettings
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Weighted sum of the loss over the tokens, and sums of metrics (detached) with equal weights.

    The loss is `pg_loss + kl_coef * kl_loss - entropy_coef * entropy_loss`. A non-finite input
    gives a non-finite loss; nothing is replaced in silence.
    """
    terms = policy_terms(log_probs, data, settings)
    pg_loss = (terms.loss * data.weights).sum()
    loss = pg_loss
    sums = {"pg_loss": pg_loss.detach(), **_clip_sums(log_probs, terms, data)}
    if data.ref is not None:
        kl = kl_estimate(log_probs, data.ref, settings.kl_type)
        if settings.unbiased_kl:
            kl = kl * bounded_exp(log_probs - data.old)
        kl_loss = (kl * data.weights).sum()
        sums["kl_loss"] = kl_loss.detach()
        loss = loss + settings.kl_coef * kl_loss
    if data.entropy is not None:
        entropy_loss = (data.entropy * data.weights).sum()
        sums["entropy_loss"] = entropy_loss.detach()
        loss = loss - settings.entropy_coef * entropy_loss
    sums["loss"] = loss.detach()
    return loss, sums


@torch.no_grad()
def _clip_sums(
    log_probs: torch.Tensor, terms: PolicyTerms, data: TokenData
) -> dict[str, torch.Tensor]:
    """Shares of clipped tokens, the mean ratio, and KL(old || current) as k1 and k3."""
    change = log_probs - data.old
    values = {
        "pg_clipfrac": terms.clipped.float(),
        "pg_clipfrac_low": (terms.clipped & (data.advantages < 0)).float(),
        "pg_clipfrac_high": (terms.clipped & (data.advantages > 0)).float(),
        "pg_clipfrac_dual": terms.dual_clipped.float(),
        "ratio": terms.ratio,
        "ppo_kl": -change,
        "ppo_kl_k3": change.exp() - 1 - change,
    }
    return {name: (value * data.weights).sum() for name, value in values.items()}
