"""The advantages of all tokens of a step: KL in the reward, estimator, normalisation."""

from __future__ import annotations

import torch

from miles_core.training.advantages import NORMALIZED_OVER_STEP, group_advantages
from miles_core.training.batch import RolloutBatch, TrainSample
from miles_core.training.config import TrainerConfig
from miles_core.training.kl import kl_estimate
from miles_core.training.reduce import sum_over_ranks
from miles_core.training.trajectories import masked, sample_sums

VARIANCE_EPSILON = 1e-8


def assign_advantages(
    batch: RolloutBatch, own: list[TrainSample], config: TrainerConfig
) -> dict[str, float]:
    """Set `advantages` of this rank's samples; metrics, equal on all ranks. Collective.

    With `kl_coef` above 0, k_t estimates the KL of the old policy to the reference at token t. The
    estimators that take a baseline from whole rewards (grpo, gspo, rloo) see the reward
    `R - kl_coef * sum(k_t)` (arXiv 2402.14740). REINFORCE++ lets a token answer for what follows
    it: `A_t = A - kl_coef * sum(k_u, u >= t)`, the samples of a trajectory one behind the other
    (arXiv 2501.03262, equation 2).
    """
    estimator = config.advantage_estimator
    assert estimator != "ppo"  # its advantages come from a critic, see `gae`
    penalties = _penalties(batch, own, config)
    rewards = list(batch.rewards)
    if penalties is not None and estimator not in NORMALIZED_OVER_STEP:
        for (trajectory, _), value in penalties.items():
            rewards[trajectory] -= value
    advantages = [0.0] * len(rewards)
    for group in batch.groups:
        of_group = group_advantages(
            torch.tensor(rewards[group.start : group.stop], dtype=torch.float64),
            estimator,
            config.grpo_std_normalization,
        )
        advantages[group.start : group.stop] = of_group.tolist()
    for sample in own:
        sample.advantages = sample.mask.float() * advantages[sample.trajectory]
    if estimator in NORMALIZED_OVER_STEP:
        if penalties is not None:
            _take_penalties_to_go(own, penalties, config)
        normalize(own)
    mean, variance = moments(own)
    metrics = {"advantage_mean": mean, "advantage_std": variance**0.5}
    if penalties is not None:
        tokens = max(1, sum(batch.tokens))
        metrics["reward_kl"] = sum(penalties.values()) / config.kl_coef / tokens
    return metrics


def penalty(sample: TrainSample, config: TrainerConfig) -> torch.Tensor:
    """kl_coef * k_t [T] of the old policy to the reference, float64."""
    old, ref = sample.logprobs["old"].double(), sample.logprobs["ref"].double()
    return config.kl_coef * kl_estimate(old, ref, config.kl_loss_type)


def _penalties(
    batch: RolloutBatch, own: list[TrainSample], config: TrainerConfig
) -> dict[tuple[int, int], float] | None:
    """Sum of kl_coef * k_t over each sample of the step."""
    if config.kl_coef == 0:
        return None
    trained = [s for s in own if s.mask.any()]
    return sample_sums(batch, trained, lambda sample: penalty(sample, config))


def _take_penalties_to_go(
    own: list[TrainSample], penalties: dict[tuple[int, int], float], config: TrainerConfig
) -> None:
    later: dict[tuple[int, int], float] = {}
    for trajectory, index in sorted(penalties, reverse=True):
        following = (trajectory, index + 1)
        later[trajectory, index] = later.get(following, 0.0) + penalties.get(following, 0.0)
    for sample in own:
        if not sample.mask.any():
            continue
        here = masked(sample, lambda s: penalty(s, config))
        to_go = here.flip(0).cumsum(0).flip(0) + later[sample.trajectory, sample.index]
        sample.advantages = (sample.advantages - to_go.float()).masked_fill(~sample.mask, 0.0)


def normalize(own: list[TrainSample]) -> None:
    """(A - mean) / sqrt(var + 1e-8) over all sampled tokens of the step, var unbiased."""
    mean, variance = moments(own)
    scale = (variance + VARIANCE_EPSILON) ** -0.5
    for sample in own:
        values = (sample.advantages.double() - mean) * scale
        sample.advantages = values.float().masked_fill(~sample.mask, 0.0)


def moments(own: list[TrainSample]) -> tuple[float, float]:
    """Mean and unbiased variance of the advantages over all sampled tokens of the step; the
    variance of a single token is 0. Collective."""
    values = [s.advantages[s.mask].double() for s in own]
    sums = {"sum": sum(v.sum().item() for v in values), "count": float(sum(map(len, values)))}
    total = sum_over_ranks(sums, ("sum", "count"))
    mean = total["sum"] / max(1.0, total["count"])
    squares = {"squares": sum((v - mean).square().sum().item() for v in values)}
    variance = sum_over_ranks(squares, ("squares",))["squares"] / max(1.0, total["count"] - 1)
    return mean, variance
