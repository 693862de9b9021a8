"""Advantages of trajectories from the rewards of their group.

R are the rewards of the n members of a group, std is unbiased:

- grpo, gspo: `(R_i - mean(R)) / (std(R) + 1e-6)` (GRPO, arXiv 2402.03300; GSPO, arXiv 2507.18071),
  or without the division (Dr. GRPO, arXiv 2503.20783);
- rloo: `R_i - mean of the others = n / (n - 1) * (R_i - mean(R))` (arXiv 2402.14740);
- reinforce_plus_plus: `R_i`; reinforce_plus_plus_baseline: `R_i - mean(R)`. Both are normalised
  over all tokens of a step afterwards (arXiv 2501.03262), see `step_advantages`.
"""

from __future__ import annotations

from typing import Literal

import torch

Estimator = Literal["grpo", "gspo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]
NORMALIZED_OVER_STEP = ("reinforce_plus_plus", "reinforce_plus_plus_baseline")
EPSILON = 1e-6


def group_advantages(
    rewards: torch.Tensor, estimator: Estimator, std_normalization: bool = True
) -> torch.Tensor:
    """Advantages [n] of the trajectories of one group from their rewards [n], in float64.

    Where a baseline is taken from the group, a group of one, or without spread, has advantages of
    zero. `std_normalization` concerns grpo and gspo alone. A reward that is not finite makes every
    advantage of its group NaN.
    """
    rewards = rewards.double()
    if not torch.isfinite(rewards).all():
        return torch.full_like(rewards, float("nan"))
    if estimator == "reinforce_plus_plus":
        return rewards
    if not has_spread(rewards):
        return torch.zeros_like(rewards)
    centred = rewards - rewards.mean()
    if estimator == "rloo":
        return centred * (len(rewards) / (len(rewards) - 1))
    if estimator == "reinforce_plus_plus_baseline" or not std_normalization:
        return centred
    return centred / (rewards.std(unbiased=True) + EPSILON)


def has_spread(rewards: torch.Tensor) -> bool:
    """Whether the rewards of a group differ."""
    return not bool((rewards == rewards[0]).all())
