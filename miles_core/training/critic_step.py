"""The critic's part of a step: values, advantages from them, and its own optimizer steps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from miles_core.training.batch import Packed
from miles_core.training.critic import Critic
from miles_core.training.trained_model import MicroBatches, Update
from miles_core.training.value_loss import VALUE_NAMES, value_loss


def _loss(
    clip: float, values: torch.Tensor, packed: Packed
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return value_loss(values, packed.value_data(), clip)


def update_critic(
    critic: Critic, parts: Sequence[MicroBatches], total_weights: Sequence[float]
) -> dict[str, float | list[str]]:
    """One optimizer step for each of `parts`, whose samples have values and returns. Collective.

    `total_weights` are the sums of the tokens' weights of each part. Metrics, equal on all ranks:
    means over the optimizer steps that were applied (of all when none was), and counts.
    """
    loss = partial(_loss, critic.config.value_clip)
    updates: list[Update] = [critic.update(part, loss, VALUE_NAMES) for part in parts]
    pairs = list(zip(updates, total_weights, strict=True))
    pairs = [(update, total) for update, total in pairs if update.applied] or pairs
    count = max(1, len(pairs))
    return {
        "value_loss": sum(u.sums["loss"] for u, _ in pairs) / count,
        "value_clipfrac": sum(u.sums["value_clipfrac"] / (w or 1.0) for u, w in pairs) / count,
        "critic_grad_norm": sum(u.grad_norm for u, _ in pairs) / count,
        "critic_lr": updates[-1].lr if updates else critic.optimizer.lr(),
        "critic_optimizer_steps": float(sum(u.applied for u in updates)),
        "critic_nonfinite_steps": float(sum(not u.applied for u in updates)),
        "critic_nonfinite": [problem for u in updates for problem in u.problems],
    }
