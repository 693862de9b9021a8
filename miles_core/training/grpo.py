"""One step of GRPO: reference and old log-probabilities, then the optimizer steps."""

from __future__ import annotations

import time
from collections import defaultdict

import torch

from miles_core.modeling.parallel import Layout
from miles_core.training.batch import Packed, RolloutBatch, TrainSample
from miles_core.training.config import TrainerConfig
from miles_core.training.losses import LossSettings, policy_loss, token_weights
from miles_core.training.packing import micro_batches
from miles_core.training.policy import Policy, Update, max_over_ranks, sum_over_ranks

LOSS_NAMES = (
    "loss",
    "pg_loss",
    "kl_loss",
    "clip_fraction",
    "ratio",
    "approx_kl",
    "tis_weight",
)


def loss_settings(config: TrainerConfig) -> LossSettings:
    """The loss that a configuration asks for."""
    return LossSettings(
        eps_low=config.eps_clip,
        eps_high=config.eps_clip_high,
        dual_clip=config.eps_clip_c,
        kl_coef=config.kl_loss_coef,
        kl_type=config.kl_loss_type,
        tis_clip=config.tis_clip if config.use_tis else None,
    )


def optimizer_batches(trajectories: int, global_batch_size: int) -> list[range]:
    """Trajectory numbers of each optimizer step: near-equal runs of about `global_batch_size`."""
    steps = max(1, round(trajectories / global_batch_size))
    bounds = [trajectories * i // steps for i in range(steps + 1)]
    return [range(a, b) for a, b in zip(bounds, bounds[1:], strict=False) if b > a]


def plan_micro_batches(
    samples: list[TrainSample], layout: Layout, max_tokens: int
) -> list[list[TrainSample]]:
    """This rank's micro-batches; the plan is the same on all ranks."""
    plan = micro_batches([len(s) for s in samples], max_tokens, layout.dp_size)
    mine = [[samples[i] for i in members] for members in plan[layout.dp_rank]]
    for number, members in enumerate(mine):
        for sample in members:
            sample.micro_batch = number
    return mine


class GrpoStep:
    """The work of one `train` call; `own_samples` are those of this rank, filled as it goes."""

    def __init__(self, policy: Policy, layout: Layout, batch: RolloutBatch) -> None:
        self._policy = policy
        self._config = policy.config
        self._batch = batch
        self._parts = self._partition(layout)
        self.own_samples = [s for part in self._parts for mb in part for s in mb]

    def _partition(self, layout: Layout) -> list[list[list[TrainSample]]]:
        """Micro-batches of this rank for each optimizer step; sets every sample's weight."""
        parts = []
        for members in optimizer_batches(len(self._batch.tokens), self._config.global_batch_size):
            samples = [s for s in self._batch.samples if s.trajectory in members]
            sizes = self._batch.tokens[members.start : members.stop]
            weights = token_weights(self._config.loss_aggregation, sizes)
            for sample in samples:
                sample.weight = weights[sample.trajectory - members.start]
            parts.append(plan_micro_batches(samples, layout, self._config.max_tokens_per_gpu))
        return parts

    def run(self) -> dict[str, float | list[str]]:
        """Metrics, equal on all ranks. Collective."""
        seconds = {}
        everything = [mb for part in self._parts for mb in part]
        started = time.perf_counter()
        if self._policy.has_reference:
            self._policy.record_reference(everything)
        seconds["seconds_reference"] = time.perf_counter() - started
        started = time.perf_counter()
        recorded = self._policy.record("old", everything)
        seconds["seconds_old"] = time.perf_counter() - started
        started = time.perf_counter()
        updates = [self._policy.update(part, self._loss, LOSS_NAMES) for part in self._parts]
        seconds["seconds_update"] = time.perf_counter() - started
        metrics: dict[str, float | list[str]] = {}
        metrics |= self._mismatch(recorded["entropy"])
        metrics |= self._summary(updates)
        metrics |= max_over_ranks(seconds)
        return metrics

    def _loss(
        self, log_probs: torch.Tensor, packed: Packed
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        data = packed.token_data(self._policy.has_reference)
        return policy_loss(log_probs, data, loss_settings(self._config))

    def _mismatch(self, entropy: float) -> dict[str, float]:
        """How far the trainer's log-probabilities are from the engine's, over all sampled tokens:
        mean and largest |old - rollout|, and KL(engine || trainer) as k3."""
        sums: dict[str, float] = defaultdict(float, entropy=entropy)
        largest = 0.0
        for sample in self.own_samples:
            if not sample.mask.any():
                continue
            difference = (sample.logprobs["old"] - sample.rollout)[sample.mask].double()
            sums["absolute"] += difference.abs().sum().item()
            sums["k3"] += (difference.exp() - 1 - difference).sum().item()
            sums["tokens"] += len(difference)
            largest = max(largest, difference.abs().max().item())
        total = sum_over_ranks(sums, ("absolute", "k3", "entropy", "tokens"))
        tokens = max(1.0, total["tokens"])
        return {
            "mismatch_abs_mean": total["absolute"] / tokens,
            "mismatch_kl": total["k3"] / tokens,
            "entropy": total["entropy"] / tokens,
            "trained_tokens": total["tokens"],
            **max_over_ranks({"mismatch_abs_max": largest}),
        }

    def _summary(self, updates: list[Update]) -> dict[str, float | list[str]]:
        """Means over the optimizer steps, and counts."""
        count = max(1, len(updates))
        names = [name for name in LOSS_NAMES if self._reports(name)]
        metrics: dict[str, float | list[str]] = {
            name: sum(u.sums[name] for u in updates) / count for name in names
        }
        rewards = self._batch.rewards
        metrics["grad_norm"] = sum(u.grad_norm for u in updates) / count
        metrics["lr"] = updates[-1].lr if updates else self._policy.optimizer.lr()
        metrics["reward_mean"] = sum(rewards) / max(1, len(rewards))
        metrics["trajectories"] = float(len(rewards))
        metrics["samples"] = float(len(self._batch.samples))
        metrics["optimizer_steps"] = float(sum(u.applied for u in updates))
        metrics["nonfinite_steps"] = float(sum(not u.applied for u in updates))
        metrics["nonfinite"] = [problem for u in updates for problem in u.problems]
        return metrics

    def _reports(self, name: str) -> bool:
        if name == "kl_loss":
            return self._policy.has_reference
        return name != "tis_weight" or self._config.use_tis
