"""Weights that correct for the engine sampling from other probabilities than the trainer computes.

With rho = exp(old - rollout), the trainer's probability of a sampled token over the engine's:

- tis: rho held to [low, high] (truncated importance sampling; Ionides 2008, for engines
  https://fengyao.notion.site/off-policy-rl);
- mis: rho where low <= rho <= high, else 0 (masked importance sampling; Liu, Li et al. 2025,
  "When Speed Kills Stability");
- icepop: mis for each token with a bound on both sides (IcePop; Ling team 2025, "Every Step
  Evolves", arXiv 2510.18855).

Level: `token`; `sequence`, where rho is the product over all sampled tokens of the trajectory; or
`geometric`, the geometric mean of those.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from miles_core.training.kl import bounded_exp

Mode = Literal["tis", "mis", "icepop"]
Level = Literal["token", "sequence", "geometric"]


@dataclass(frozen=True)
class ImportanceSettings:
    """How to correct; `low` and `high` bound rho."""

    mode: Mode = "tis"
    level: Level = "token"
    low: float = 0.0
    high: float = 2.0


def importance_weights(log_rho: torch.Tensor, settings: ImportanceSettings) -> torch.Tensor:
    """Weights from log rho at the level of the settings, same shape; NaN where not finite."""
    rho = bounded_exp(log_rho)
    if settings.mode == "tis":
        return rho.clamp(settings.low, settings.high)
    return rho.masked_fill(outside(log_rho, settings), 0.0)


def outside(log_rho: torch.Tensor, settings: ImportanceSettings) -> torch.Tensor:
    """Whether rho lies outside the bounds, so that its weight is cut to one or to 0; false for
    NaN."""
    rho = bounded_exp(log_rho)
    return (rho < settings.low) | (rho > settings.high)
