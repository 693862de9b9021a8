"""Settings of adapters that make no sense are refused, with the field and what to do."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from miles_core.config.load import load_config
from miles_core.config.lora import LoraSettings, module_fault, possible_modules
from miles_core.config.schema import MilesConfig, TrainingConfig
from miles_core.runs.identity import changes
from miles_core.training.config import trainer_config

ON = {"lora_rank": 8, "lr": 1e-5}


def refusal(config: MilesConfig, training: dict[str, Any], **model: Any) -> str:
    values = config.model_dump(exclude_unset=True)
    values["training"] |= training
    values["model"] |= model
    with pytest.raises(ValidationError) as error:
        MilesConfig.model_validate(values)
    return str(error.value)


@pytest.mark.parametrize(
    ("training", "model", "key", "reason"),
    [
        ({"lora_alpha": 4}, {}, "training.lora_alpha", "set --lora-rank"),
        ({"target_modules": ["q_proj"]}, {}, "training.target_modules", "set --lora-rank"),
        ({"lora_rank": 8}, {}, "training.lr", "set --lr"),
        (
            {**ON, "target_modules": ["q_proj", "gateproj"]},
            {},
            "training.target_modules",
            "did you mean gate_proj?",
        ),
        (
            {**ON, "target_modules": ["all-linear", "q_proj"]},
            {},
            "training.target_modules",
            "leave the others out",
        ),
        (ON, {"ref_load": Path("ref")}, "model.ref_load", "without its adapter"),
    ],
)
def test_what_makes_no_sense_is_refused(
    training: dict[str, Any],
    model: dict[str, Any],
    key: str,
    reason: str,
    small_config: MilesConfig,
) -> None:
    text = refusal(small_config, training, **model)
    assert f"{key}: " in text and reason in text


def test_the_values_reach_the_trainer() -> None:
    def settings(**values: Any) -> LoraSettings | None:
        return trainer_config(TrainingConfig(**values), seed=3, temperature=1.0).lora

    assert settings() is None
    assert settings(lora_rank=8) == LoraSettings(8, 16.0, (), 3)
    assert settings(lora_rank=8, target_modules=["all-linear"]) == LoraSettings(8, 16.0, (), 3)
    some = settings(lora_rank=8, lora_alpha=4, target_modules=["q_proj", "v_proj"])
    assert some == LoraSettings(8, 4.0, ("q_proj", "v_proj"), 3)
    assert some is not None and some.scale == 0.5


def test_a_resume_may_not_change_them(small_config: MilesConfig) -> None:
    values = small_config.model_dump(exclude_unset=True)
    values["training"] |= ON
    before = MilesConfig.model_validate(values)
    for name, value in (("lora_rank", 4), ("lora_alpha", 4.0), ("target_modules", ["q_proj"])):
        training = {**values["training"], name: value}
        after = MilesConfig.model_validate({**values, "training": training})
        (change,) = changes(before, after)
        assert change.key == f"training.{name}" and change.refused


def test_flags_and_a_stored_configuration_are_read_back(
    small_config: MilesConfig, tmp_path: Path
) -> None:
    flags = {"training.lora_rank": "8", "training.target_modules": "q_proj,v_proj"}
    config = load_config("quickstart", flags=flags).config
    assert config.training.lora_rank == 8
    assert config.training.target_modules == ["q_proj", "v_proj"]
    assert MilesConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    ("config", "modules", "message"),
    [
        ({"kv_lora_rank": 4, "q_lora_rank": 4}, "q_a_proj q_b_proj o_proj", None),
        ({"kv_lora_rank": 4, "q_lora_rank": 4}, "q_proj", "its attention has no such layer"),
        ({"kv_lora_rank": 4}, "q_proj kv_a_proj_with_mqa kv_b_proj", None),
        ({"num_experts": 4}, "q_proj", None),
        ({"n_routed_experts": 4}, "up_proj", "in their attention alone"),
        ({}, "q_proj up_proj down_proj", None),
        ({}, "kv_b_proj", "its attention has no such layer"),
    ],
)
def test_a_layer_that_the_model_does_not_have_is_refused(
    config: dict[str, Any], modules: str, message: str | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    fault = module_fault(modules.split(), possible_modules(tmp_path))
    assert fault is None if message is None else message in str(fault)
