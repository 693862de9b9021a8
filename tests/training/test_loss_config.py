"""Combinations of the algorithm's options that make no sense are refused, with the reason."""

from typing import Any

import pytest
from pydantic import ValidationError

from miles_core.config.algorithm_checks import algorithm_errors
from miles_core.config.schema import MilesConfig, TrainingConfig
from miles_core.training.config import TrainerConfig, trainer_config

ICEPOP = {"use_tis": True, "tis_mode": "icepop"}
REFUSED = [
    ({"advantage_estimator": "rloo"}, 1, "rollout.n_samples_per_prompt", "every advantage is zero"),
    ({}, 1, "rollout.n_samples_per_prompt", "reinforce_plus_plus"),
    (
        {"advantage_estimator": "rloo", "grpo_std_normalization": False},
        4,
        "training.grpo_std_normalization",
        "rloo never divides",
    ),
    ({"kl_coef": 0.1}, 4, "training.kl_coef", "in the loss or in the reward"),
    (
        {"use_unbiased_kl": True, "kl_loss_coef": 0},
        4,
        "training.use_unbiased_kl",
        "kl_loss_coef is 0",
    ),
    ({"kl_loss_type": "k1"}, 4, "training.kl_loss_type", "expectation is zero"),
    ({"kl_loss_type": "k3", "kl_loss_coef": 0}, 4, "training.kl_loss_type", "no KL is computed"),
    ({"loss_aggregation": "constant"}, 4, "training.loss_constant_length", "needs it"),
    ({"loss_constant_length": 9}, 4, "training.loss_constant_length", "no other uses it"),
    ({"tis_mode": "mis"}, 4, "training.tis_mode", "no effect"),
    ({"tis_level": "sequence"}, 4, "training.tis_level", "no effect"),
    ({"tis_clip": 3.0}, 4, "training.tis_clip", "no effect"),
    ({"tis_clip_low": 0.5}, 4, "training.tis_clip_low", "no effect"),
    ({**ICEPOP, "tis_clip_low": 0.0}, 4, "training.tis_clip_low", "both sides"),
    (
        {**ICEPOP, "tis_clip_low": 0.5, "tis_level": "geometric"},
        4,
        "training.tis_level",
        "not by geometric",
    ),
    ({"use_tis": True, "tis_clip": 0.8}, 4, "training.tis_clip", "leave out 1"),
    (
        {"use_tis": True, "tis_mode": "mis", "tis_clip_low": 1.1},
        4,
        "training.tis_clip",
        "leave out 1",
    ),
    (
        {"use_tis": True, "tis_clip": 2.0, "tis_clip_low": 2.5},
        4,
        "training.tis_clip_low",
        "must be below",
    ),
    ({"gamma": 0.9}, 4, "training.gamma", "grpo has none"),
    ({"lambd": 0.9, "advantage_estimator": "rloo"}, 4, "training.lambd", "rloo has none"),
    ({"normalize_advantages": False}, 4, "training.normalize_advantages", "no effect"),
    ({"value_clip": 0.5}, 4, "training.value_clip", "no effect"),
    ({"critic_lr": 1e-5}, 4, "training.critic_lr", "no effect"),
    ({"critic_lr_warmup_steps": 3}, 4, "training.critic_lr_warmup_steps", "no effect"),
    ({"num_critic_only_steps": 3}, 4, "training.num_critic_only_steps", "no effect"),
    (
        {"advantage_estimator": "ppo", "grpo_std_normalization": False},
        4,
        "training.grpo_std_normalization",
        "ppo never divides",
    ),
    ({"use_tis": True, "use_rollout_logprobs": True}, 4, "training.use_tis", "every weight is 1"),
    (
        {"use_routing_replay": True, "use_rollout_logprobs": True},
        4,
        "training.use_routing_replay",
        "--use-rollout-routing-replay",
    ),
]
ACCEPTED: list[tuple[dict[str, Any], int]] = [
    ({}, 2),
    ({"advantage_estimator": "reinforce_plus_plus"}, 1),
    ({"advantage_estimator": "gspo", "grpo_std_normalization": False}, 4),
    ({"kl_coef": 0.1, "kl_loss_coef": 0, "kl_loss_type": "k1"}, 4),
    ({"kl_loss_type": "k1", "use_unbiased_kl": True}, 4),
    ({"loss_aggregation": "constant", "loss_constant_length": 100}, 4),
    ({**ICEPOP, "tis_clip_low": 0.5, "tis_clip": 5.0}, 4),
    ({"use_tis": True, "tis_mode": "mis", "tis_level": "sequence"}, 4),
    ({"advantage_estimator": "ppo", "lambd": 0.95, "critic_lr": 1e-5, "value_clip": 0.5}, 1),
    ({"advantage_estimator": "ppo", "use_tis": True, "kl_coef": 0.1, "kl_loss_coef": 0}, 4),
    ({"use_rollout_logprobs": True, "use_rollout_routing_replay": True}, 4),
]


@pytest.mark.parametrize(("values", "group_size", "key", "reason"), REFUSED)
def test_what_makes_no_sense_is_refused(
    values: dict[str, Any], group_size: int, key: str, reason: str
) -> None:
    lines = algorithm_errors(TrainingConfig(**values), group_size)
    found = [line for line in lines if line.startswith(f"{key}: ") and reason in line]
    assert len(found) == 1, lines


@pytest.mark.parametrize(("values", "group_size"), ACCEPTED)
def test_what_makes_sense_is_not(values: dict[str, Any], group_size: int) -> None:
    assert algorithm_errors(TrainingConfig(**values), group_size) == []


def test_a_run_with_such_a_combination_does_not_start(small_config: MilesConfig) -> None:
    values = small_config.model_dump()
    assert MilesConfig.model_validate(values) == small_config
    values["training"]["kl_coef"] = 0.5
    with pytest.raises(ValidationError, match="--kl-loss-coef 0 or --kl-coef 0"):
        MilesConfig.model_validate(values)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": {"critic_load": "elsewhere"}}, "model.critic_load: grpo has no critic"),
        (
            {"training": {"advantage_estimator": "ppo", "num_critic_only_steps": 99}},
            "training.num_critic_only_steps: 99 leaves none of the",
        ),
        ({"rollout": {"min_group_size": 1}}, "rollout.min_group_size: grpo compares"),
        ({"rollout": {"n_samples_per_prompt": 1}}, "set --min-group-size 1"),
    ],
)
def test_a_critic_without_ppo_and_groups_of_one(
    small_config: MilesConfig, changes: dict[str, Any], reason: str
) -> None:
    values = small_config.model_dump()
    for section, fields in changes.items():
        values[section] |= fields
    with pytest.raises(ValidationError, match=reason):
        MilesConfig.model_validate(values)


def test_ppo_with_one_trajectory_of_each_prompt(small_config: MilesConfig) -> None:
    values = small_config.model_dump()
    values["rollout"] |= {"n_samples_per_prompt": 1, "min_group_size": 1}
    batch = values["rollout"]["rollout_batch_size"]
    values["training"] |= {"advantage_estimator": "ppo", "global_batch_size": batch}
    values["model"]["critic_load"] = "elsewhere"
    assert MilesConfig.model_validate(values).rollout.n_samples_per_prompt == 1


def test_the_trainer_gets_every_option_with_the_same_default() -> None:
    assert trainer_config(TrainingConfig(), seed=0, temperature=1.0) == TrainerConfig()
    changed = TrainingConfig(advantage_estimator="rloo", kl_coef=0.5, kl_loss_coef=0)
    assert trainer_config(changed, seed=0, temperature=1.0).needs_reference
    assert not TrainerConfig(kl_loss_coef=0.0).needs_reference
