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


def test_the_trainer_gets_every_option_with_the_same_default() -> None:
    assert trainer_config(TrainingConfig(), seed=0, temperature=1.0) == TrainerConfig()
    changed = TrainingConfig(advantage_estimator="rloo", kl_coef=0.5, kl_loss_coef=0)
    assert trainer_config(changed, seed=0, temperature=1.0).needs_reference
    assert not TrainerConfig(kl_loss_coef=0.0).needs_reference
