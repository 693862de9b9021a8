"""Advantages of the members of a group, one for each trajectory.

With rewards R of a group: `A_i = (R_i - mean(R)) / (std(R) + 1e-6)`, std unbiased (GRPO,
arXiv 2402.03300), or without the division (Dr. GRPO, arXiv 2503.20783).
"""

from __future__ import annotations

import torch

EPSILON = 1e-6


def group_advantages(rewards: torch.Tensor, std_normalization: bool) -> torch.Tensor:
    """Advantages [n] of the trajectories of one group from their rewards [n], in float64.

    A group of one, or without spread, has advantages of zero. Raises ValueError for a reward that
    is not finite.
    """
    if not torch.isfinite(rewards).all():
        raise ValueError(f"rewards of a group must be finite, not {rewards.tolist()}")
    rewards = rewards.double()
    centred = rewards - rewards.mean()
    if len(rewards) < 2 or bool((rewards == rewards[0]).all()):
        return torch.zeros_like(rewards)
    if not std_normalization:
        return centred
    return centred / (rewards.std(unbiased=True) + EPSILON)
