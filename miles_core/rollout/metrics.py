"""Figures of a step's rollout."""

from __future__ import annotations

from typing import Any

from miles_core.rollout.loop import Group


def rollout_metrics(groups: list[Group]) -> dict[str, Any]:
    """Rewards, sizes and seconds over the trajectories that are trained on."""
    trajectories = [t for group in groups for t in group.trajectories]
    rewards = [reward for group in groups for reward in group.rewards]
    count = len(trajectories)
    return {
        "reward_mean": sum(rewards) / count,
        "reward_max": max(rewards),
        "groups": len(groups),
        "groups_with_spread": sum(len(set(group.rewards)) > 1 for group in groups),
        "trajectories": count,
        "turns_mean": sum(t.model_calls for t in trajectories) / count,
        "tokens_mean": sum(t.trained_tokens for t in trajectories) / count,
        "trial_seconds_mean": sum(t.seconds for t in trajectories) / count,
    }
