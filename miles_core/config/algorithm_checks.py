"""Combinations of the algorithm's options that make no sense, each with the reason."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from miles_core.config.schema import TrainingConfig

WITHOUT_GROUPS = ("reinforce_plus_plus", "ppo")
"""Estimators that do not compare a trajectory with the others of its prompt."""
CRITIC_FIELDS = (
    "gamma",
    "lambd",
    "normalize_advantages",
    "value_clip",
    "critic_lr",
    "critic_lr_warmup_steps",
    "num_critic_only_steps",
)


def algorithm_errors(training: TrainingConfig, group_size: int) -> list[str]:
    """Every violated rule, as one line for a person; `group_size` trajectories share a prompt."""
    return [
        *_estimator_errors(training, group_size),
        *_kl_errors(training),
        *_aggregation_errors(training),
        *_importance_errors(training),
        *_critic_errors(training),
        *_rollout_log_prob_errors(training),
    ]


def _estimator_errors(training: TrainingConfig, group_size: int) -> list[str]:
    errors = []
    estimator = training.advantage_estimator
    if group_size == 1 and estimator not in WITHOUT_GROUPS:
        errors.append(
            f"rollout.n_samples_per_prompt: with 1, {estimator} compares a trajectory with itself "
            "and every advantage is zero; set --n-samples-per-prompt to at least 2, or "
            f"--advantage-estimator {' or '.join(WITHOUT_GROUPS)}"
        )
    if not training.grpo_std_normalization and estimator not in ("grpo", "gspo"):
        errors.append(
            f"training.grpo_std_normalization: {estimator} never divides by the group's standard "
            "deviation, so false has no effect; leave it out"
        )
    return errors


def _kl_errors(training: TrainingConfig) -> list[str]:
    errors = []
    if training.kl_loss_coef > 0 and training.kl_coef > 0:
        errors.append(
            "training.kl_coef: the KL to the reference is either in the loss or in the reward; "
            "set --kl-loss-coef 0 or --kl-coef 0"
        )
    if training.use_unbiased_kl and training.kl_loss_coef == 0:
        errors.append(
            "training.use_unbiased_kl: it changes the KL in the loss, and kl_loss_coef is 0; set "
            "--kl-loss-coef or leave it out"
        )
    if training.kl_loss_coef == 0 and training.kl_coef == 0:
        errors += [
            f"training.{name}: no KL is computed while kl_loss_coef and kl_coef are 0, so it has "
            "no effect; set --kl-loss-coef or --kl-coef, or leave it out"
            for name in _changed(training, ("kl_loss_type",))
        ]
    if training.kl_loss_type == "k1" and training.kl_loss_coef > 0 and not training.use_unbiased_kl:
        errors.append(
            "training.kl_loss_type: as a loss k1 has a gradient whose expectation is zero, so it "
            "would not hold the policy to the reference; set --kl-loss-type k2, k3 or low_var_kl, "
            "or --use-unbiased-kl true"
        )
    return errors


def _aggregation_errors(training: TrainingConfig) -> list[str]:
    constant = training.loss_constant_length is not None
    if constant != (training.loss_aggregation == "constant"):
        return [
            "training.loss_constant_length: the aggregation 'constant' needs it and no other uses "
            "it; set --loss-aggregation constant and --loss-constant-length, or neither"
        ]
    return []


def _changed(training: TrainingConfig, names: Iterable[str]) -> list[str]:
    """Those of the fields that differ from their defaults."""
    fields = type(training).model_fields
    return [name for name in names if getattr(training, name) != fields[name].default]


def _rollout_log_prob_errors(training: TrainingConfig) -> list[str]:
    if training.use_rollout_logprobs and training.use_routing_replay:
        return [
            "training.use_routing_replay: it replays the pass that computes the old "
            "log-probabilities, which use_rollout_logprobs saves; leave out one of the two, or set "
            "--use-rollout-routing-replay instead"
        ]
    return []


def _critic_errors(training: TrainingConfig) -> list[str]:
    if training.advantage_estimator == "ppo":
        return []
    return [
        f"training.{name}: it concerns the critic of advantage_estimator ppo, and "
        f"{training.advantage_estimator} has none, so it has no effect; leave it out or set "
        "--advantage-estimator ppo"
        for name in _changed(training, CRITIC_FIELDS)
    ]


def _importance_errors(training: TrainingConfig) -> list[str]:
    if not training.use_tis:
        changed = _changed(training, ("tis_mode", "tis_level", "tis_clip", "tis_clip_low"))
        return [
            f"training.{name}: it has no effect without importance weights; set --use-tis true or "
            "leave it out"
            for name in changed
        ]
    errors = []
    if training.use_rollout_logprobs:
        errors.append(
            "training.use_tis: with use_rollout_logprobs the engine's log-probabilities are taken "
            "for the trainer's, so every weight is 1; leave out one of the two"
        )
    if training.tis_clip_low >= training.tis_clip:
        errors.append(
            f"training.tis_clip_low: {training.tis_clip_low:g} must be below tis_clip "
            f"({training.tis_clip:g})"
        )
    if training.tis_mode == "icepop":
        if training.tis_level != "token":
            errors.append(
                f"training.tis_level: icepop masks single tokens, not by {training.tis_level}; set "
                "--tis-level token or --tis-mode mis"
            )
        if training.tis_clip_low == 0:
            errors.append(
                "training.tis_clip_low: icepop masks on both sides and needs a lower bound; set "
                "--tis-clip-low (its authors use 0.5, with --tis-clip 5) or --tis-mode mis"
            )
    if training.tis_clip < 1 or training.tis_clip_low > 1:
        errors.append(
            f"training.tis_clip: the bounds {training.tis_clip_low:g} to {training.tis_clip:g} "
            "leave out 1, the weight where engine and trainer agree"
        )
    return errors
