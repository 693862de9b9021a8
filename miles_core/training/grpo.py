"""One step: recorded log-probabilities, advantages, then the optimizer steps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from miles_core.modeling.parallel import Layout
from miles_core.training.advantages import has_spread
from miles_core.training.balance import Work, plan_work
from miles_core.training.batch import Packed, RolloutBatch, TrainSample
from miles_core.training.config import TrainerConfig
from miles_core.training.critic import Critic
from miles_core.training.critic_step import update_critic
from miles_core.training.gae import assign_gae
from miles_core.training.importance import ImportanceSettings
from miles_core.training.losses import (
    LOSS_NAMES,
    MEANS,
    PARTS,
    LossSettings,
    policy_loss,
    token_weights,
)
from miles_core.training.mismatch import assign_importance, mismatch_metrics
from miles_core.training.policy import Policy
from miles_core.training.reduce import max_over_ranks, sum_over_ranks
from miles_core.training.step_advantages import assign_advantages
from miles_core.training.trained_model import Update
from miles_core.training.trajectories import trajectory_sums


def loss_settings(config: TrainerConfig) -> LossSettings:
    """The loss that a configuration asks for."""
    return LossSettings(
        eps_low=config.eps_clip,
        eps_high=config.eps_clip_high,
        dual_clip=config.eps_clip_c,
        kl_coef=config.kl_loss_coef,
        kl_type=config.kl_loss_type,
        unbiased_kl=config.use_unbiased_kl,
        entropy_coef=config.entropy_coef,
    )


def importance_settings(config: TrainerConfig) -> ImportanceSettings:
    """The correction that a configuration asks for when `use_tis` is set."""
    return ImportanceSettings(
        config.tis_mode, config.tis_level, low=config.tis_clip_low, high=config.tis_clip
    )


def optimizer_batches(trajectories: int, global_batch_size: int) -> list[range]:
    """Trajectory numbers of each optimizer step: near-equal runs of about `global_batch_size`."""
    steps = max(1, round(trajectories / global_batch_size))
    bounds = [trajectories * i // steps for i in range(steps + 1)]
    return [range(a, b) for a, b in zip(bounds, bounds[1:], strict=False) if b > a]


class GrpoStep:
    """The work of one `train` call; `own_samples` are those of this rank, filled as it goes."""

    def __init__(
        self, policy: Policy, layout: Layout, batch: RolloutBatch, critic: Critic | None = None
    ) -> None:
        self._policy = policy
        self._critic = critic
        self._config = policy.config
        self._batch = batch
        self._total_weights: list[float] = []
        self.works = self._partition(layout)
        self._parts = [work.mine for work in self.works]
        self.own_samples = [s for part in self._parts for mb in part for s in mb]
        self._seconds: dict[str, float] = {}

    def _partition(self, layout: Layout) -> list[Work]:
        """The work of each optimizer step; sets every sample's weight."""
        config = self._config
        works = []
        for members in optimizer_batches(len(self._batch.tokens), config.global_batch_size):
            samples = [s for s in self._batch.samples if s.trajectory in members]
            sizes = self._batch.tokens[members.start : members.stop]
            weights = token_weights(config.loss_aggregation, sizes, config.loss_constant_length)
            for sample in samples:
                sample.weight = weights[sample.trajectory - members.start]
            self._total_weights.append(sum(w * n for w, n in zip(weights, sizes, strict=True)))
            works.append(plan_work(samples, layout, config, self._policy.spec))
        return works

    def run(self) -> dict[str, float | list[str]]:
        """Metrics, equal on all ranks. Collective."""
        everything = [mb for part in self._parts for mb in part]
        routing = self._policy.routing
        if routing is not None:
            routing.begin(self._batch, self.own_samples)
        if self._policy.has_reference:
            with self._timed("seconds_reference"):
                self._policy.record_reference(everything)
        metrics = self._old_log_probs(everything)
        metrics |= self._advantages(everything)
        if self._config.use_tis:
            settings = importance_settings(self._config)
            metrics |= assign_importance(self._batch, self.own_samples, settings)
        if self._critic is not None:
            with self._timed("seconds_critic"):
                metrics |= update_critic(self._critic, self._parts, self._total_weights)
        if self._batch.step >= self._config.num_critic_only_steps:
            metrics |= self._update_policy()
        metrics |= self._rewards()
        if routing is not None:
            metrics |= routing.metrics()
        metrics |= max_over_ranks(self._seconds)
        return metrics

    def _old_log_probs(self, everything: list[list[TrainSample]]) -> dict[str, float | list[str]]:
        """Set the log-probabilities before the step; what they show of engine and entropy."""
        if self._config.use_rollout_logprobs:
            for sample in self.own_samples:
                sample.logprobs["old"] = sample.rollout.masked_fill(~sample.mask, 0.0)
            return {}
        with self._timed("seconds_old"):
            recorded = self._policy.record("old", everything)
        return {**mismatch_metrics(self.own_samples), **self._entropy(recorded["entropy"])}

    def _advantages(self, everything: list[list[TrainSample]]) -> dict[str, float]:
        if self._critic is None:
            return assign_advantages(self._batch, self.own_samples, self._config)
        with self._timed("seconds_values"):
            self._critic.record(everything)
        return assign_gae(self._batch, self.own_samples, self._config)

    def _update_policy(self) -> dict[str, float | list[str]]:
        with self._timed("seconds_update"):
            updates = [self._update(number) for number in range(len(self._parts))]
        metrics = self._summary(updates)
        if self._config.use_rollout_logprobs and self._parts:
            # the first optimizer step saw the policy as it was before the step
            first = [sample for mb in self._parts[0] for sample in mb]
            metrics |= mismatch_metrics(first, trainer="current")
        return metrics

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._seconds[name] = time.perf_counter() - started

    def _update(self, number: int) -> Update:
        part = self._parts[number]
        if self._config.advantage_estimator == "gspo":
            old = number == 0 and not self._config.use_rollout_logprobs
            self._record_sequence_ratios(part, weights_are_old=old)
        return self._policy.update(part, self._loss, LOSS_NAMES)

    def _record_sequence_ratios(self, part: list[list[TrainSample]], weights_are_old: bool) -> None:
        """Set `sequence_log_ratio`, the mean of current - old over the whole trajectory.

        The samples of a trajectory may lie in several micro-batches and ranks, so the current
        log-probabilities are recorded first, unless no update was made since the old ones were.
        """
        current = "old" if weights_are_old else "current"
        if not weights_are_old:
            self._policy.record("current", part)
        samples = [s for mb in part for s in mb]
        sums = trajectory_sums(
            self._batch,
            [s for s in samples if s.mask.any()],
            lambda s: s.logprobs[current] - s.logprobs["old"],
        )
        for sample in samples:
            size = max(1, self._batch.tokens[sample.trajectory])
            sample.sequence_log_ratio = sums[sample.trajectory] / size

    def _loss(
        self, log_probs: torch.Tensor, packed: Packed
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        data = packed.token_data(with_reference=self._has_kl_loss())
        return policy_loss(log_probs, data, loss_settings(self._config))

    def _has_kl_loss(self) -> bool:
        return self._policy.has_reference and self._config.kl_loss_coef > 0

    def _entropy(self, own_sum: float) -> dict[str, float]:
        total = sum_over_ranks({"entropy": own_sum}, ("entropy",))
        return {"entropy": total["entropy"] / max(1, sum(self._batch.tokens))}

    def _summary(self, updates: list[Update]) -> dict[str, float | list[str]]:
        """Means over the optimizer steps that were applied (of all when none was), and counts."""
        pairs = list(zip(updates, self._total_weights, strict=True))
        pairs = [(update, total) for update, total in pairs if update.applied] or pairs
        count = max(1, len(pairs))
        names = [name for name in LOSS_NAMES if self._reports(name)]
        metrics: dict[str, float | list[str]] = {
            name: sum(u.sums[name] for u, _ in pairs) / count for name in names if name in PARTS
        }
        metrics |= {
            name: sum(u.sums[name] / (total or 1.0) for u, total in pairs) / count
            for name in names
            if name in MEANS
        }
        metrics["grad_norm"] = sum(u.grad_norm for u, _ in pairs) / count
        metrics["lr"] = updates[-1].lr if updates else self._policy.optimizer.lr()
        metrics["optimizer_steps"] = float(sum(u.applied for u in updates))
        metrics["nonfinite_steps"] = float(sum(not u.applied for u in updates))
        metrics["nonfinite"] = [problem for u in updates for problem in u.problems]
        return metrics

    def _reports(self, name: str) -> bool:
        conditional = {
            "kl_loss": self._has_kl_loss(),
            "entropy_loss": self._config.entropy_coef > 0,
            "pg_clipfrac_dual": self._config.eps_clip_c is not None,
        }
        return conditional.get(name, True)

    def _rewards(self) -> dict[str, float | list[str]]:
        rewards = torch.tensor(self._batch.rewards, dtype=torch.float64)
        of_groups = [rewards[g.start : g.stop] for g in self._batch.groups]
        flat = [group for group in of_groups if len(group) and not has_spread(group)]
        return {
            "reward_mean": rewards.mean().item() if len(rewards) else 0.0,
            "reward_std": rewards.std().item() if len(rewards) > 1 else 0.0,
            "frac_reward_zero_std": len(flat) / max(1, len(of_groups)),
            "trajectories": float(len(rewards)),
            "samples": float(len(self._batch.samples)),
            "trained_tokens": float(sum(self._batch.tokens)),
        }
