"""The engine's log-probabilities against the trainer's: metrics and importance weights."""

from __future__ import annotations

import math
from collections import defaultdict

import torch

from miles_core.training.batch import RolloutBatch, TrainSample
from miles_core.training.importance import ImportanceSettings, importance_weights, outside
from miles_core.training.reduce import max_over_ranks, sum_over_ranks
from miles_core.training.trajectories import trajectory_sums


def mismatch_metrics(own: list[TrainSample], trainer: str = "old") -> dict[str, float]:
    """Over all sampled tokens of the samples, with x = log-probability called `trainer` - rollout;
    equal on all ranks. Collective.

    Mean and largest |x| (infinite where one is NaN, which a maximum over ranks would lose), and
    the divergences as means over the engine's samples: KL(engine || trainer) of exp(x) - 1 - x,
    KL(trainer || engine) of x exp(x) - exp(x) + 1.
    """
    sums: dict[str, float] = defaultdict(float)
    largest = 0.0
    for sample in own:
        if not sample.mask.any():
            continue
        x = (sample.logprobs[trainer] - sample.rollout)[sample.mask].double()
        sums["absolute"] += x.abs().sum().item()
        sums["forward"] += (x.exp() - 1 - x).sum().item()
        sums["reverse"] += (x * x.exp() - x.exp() + 1).sum().item()
        sums["tokens"] += len(x)
        largest = max(largest, x.abs().nan_to_num(nan=math.inf, posinf=math.inf).max().item())
    total = sum_over_ranks(sums, ("absolute", "forward", "reverse", "tokens"))
    tokens = max(1.0, total["tokens"])
    return {
        "train_rollout_logprob_abs_diff": total["absolute"] / tokens,
        "train_rollout_kl": total["forward"] / tokens,
        "train_rollout_kl_reverse": total["reverse"] / tokens,
        **max_over_ranks({"train_rollout_logprob_abs_diff_max": largest}),
    }


def assign_importance(
    batch: RolloutBatch, own: list[TrainSample], settings: ImportanceSettings
) -> dict[str, float]:
    """Set the importance weights `tis` of this rank's samples; metrics over all sampled tokens of
    the step, equal on all ranks: mean weight `tis`, `tis_abs`, the mean |weight - 1|, and
    `tis_clipfrac`, the share whose weight was cut to a bound (tis) or to 0 (mis, icepop).
    Collective.
    """
    trained = [s for s in own if s.mask.any()]
    per_trajectory = None
    if settings.level != "token":
        per_trajectory = trajectory_sums(batch, trained, _log_rho)
    if settings.level == "geometric" and per_trajectory is not None:
        per_trajectory = [s / max(1, n) for s, n in zip(per_trajectory, batch.tokens, strict=True)]
    sums: dict[str, float] = defaultdict(float)
    for sample in own:
        sample.tis = torch.zeros(len(sample))
    for sample in trained:
        log_rho = _log_rho(sample)
        if per_trajectory is not None:
            log_rho = torch.full_like(log_rho, per_trajectory[sample.trajectory])
        weights = importance_weights(log_rho, settings)
        sample.tis = weights.masked_fill(~sample.mask, 0.0)
        sums["tis"] += weights[sample.mask].double().sum().item()
        sums["tis_abs"] += (weights[sample.mask].double() - 1).abs().sum().item()
        sums["tis_clipfrac"] += float(outside(log_rho, settings)[sample.mask].sum())
    total = sum_over_ranks(sums, ("tis", "tis_abs", "tis_clipfrac"))
    return {name: value / max(1, sum(batch.tokens)) for name, value in total.items()}


def _log_rho(sample: TrainSample) -> torch.Tensor:
    return sample.logprobs["old"] - sample.rollout
