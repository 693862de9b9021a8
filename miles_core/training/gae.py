"""Generalised advantage estimation (arXiv 1506.02438) over the sampled tokens of a step."""

from __future__ import annotations

import torch

from miles_core.training.batch import RolloutBatch, TrainSample
from miles_core.training.config import TrainerConfig
from miles_core.training.step_advantages import moments, normalize, penalty
from miles_core.training.trajectories import flat_tokens


def gae(
    rewards: list[float], values: list[float], gamma: float, lambd: float
) -> tuple[list[float], list[float]]:
    """Advantages and returns of the T steps of one episode, which ends after the last one.

    `delta_t = r_t + gamma V_{t+1} - V_t` with a V of 0 after the end,
    `A_t = delta_t + gamma lambd A_{t+1}` (equations 12 and 16), return `A_t + V_t`.
    """
    advantages = [0.0] * len(values)
    following = later = 0.0  # V and A of the step after
    for t in reversed(range(len(values))):
        delta = rewards[t] + gamma * following - values[t]
        later = advantages[t] = delta + gamma * lambd * later
        following = values[t]
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


def assign_gae(
    batch: RolloutBatch, own: list[TrainSample], config: TrainerConfig
) -> dict[str, float]:
    """Set `advantages` and `returns` of this rank's samples from their `values`; metrics, equal on
    all ranks. Collective.

    The steps of a trajectory are its sampled tokens, those of its samples one behind the other:
    tokens that the model did not sample, and the end of a sample, are no step. The reward is that
    of the last one; each step pays `kl_coef * k_t` for the KL of the old policy to the reference.
    """
    values = flat_tokens(batch, own, lambda s: _recorded(s))
    rewards = torch.zeros_like(values)
    if config.kl_coef > 0:
        rewards -= flat_tokens(batch, own, lambda s: penalty(s, config))
    metrics = {}
    if config.kl_coef > 0:
        metrics["reward_kl"] = -rewards.sum().item() / config.kl_coef / max(1, len(rewards))
    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    start = 0
    for reward, size in zip(batch.rewards, batch.tokens, strict=True):
        if size:
            steps = slice(start, start + size)
            rewards[start + size - 1] += reward
            a, r = gae(rewards[steps].tolist(), values[steps].tolist(), config.gamma, config.lambd)
            advantages[steps], returns[steps] = values.new_tensor(a), values.new_tensor(r)
            start += size
    _give(batch, own, advantages, returns)
    if config.normalize_advantages:
        normalize(own)
    mean, variance = moments(own)
    metrics |= {"advantage_mean": mean, "advantage_std": variance**0.5}
    return metrics | _value_metrics(values, returns)


def _give(
    batch: RolloutBatch, own: list[TrainSample], advantages: torch.Tensor, returns: torch.Tensor
) -> None:
    mine = {(s.trajectory, s.index) for s in own}
    counts = [int(s.mask.sum()) for s in batch.samples]
    parts = zip(batch.samples, advantages.split(counts), returns.split(counts), strict=True)
    for sample, of_advantages, of_returns in parts:
        if (sample.trajectory, sample.index) in mine:
            sample.advantages = _on_mask(sample, of_advantages)
            sample.returns = _on_mask(sample, of_returns)


def _on_mask(sample: TrainSample, values: torch.Tensor) -> torch.Tensor:
    full = torch.zeros_like(sample.advantages)
    full[sample.mask] = values.to(full.dtype)
    return full


def _value_metrics(values: torch.Tensor, returns: torch.Tensor) -> dict[str, float]:
    """Means over all sampled tokens, and 1 - Var(returns - values) / Var(returns)."""
    spread = returns.var(unbiased=False).item() if len(returns) else 0.0
    left = (returns - values).var(unbiased=False).item() if len(returns) else 0.0
    return {
        "value_mean": values.mean().item() if len(values) else 0.0,
        "return_mean": returns.mean().item() if len(returns) else 0.0,
        "value_explained_variance": 1 - left / spread if spread > 0 else 0.0,
    }


def _recorded(sample: TrainSample) -> torch.Tensor:
    assert sample.values is not None
    return sample.values
