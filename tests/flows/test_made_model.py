"""What the settings ask of a model that a recipe makes is asked as soon as it is made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tasks.prepare
from miles_core.config.load import load_config
from miles_core.preflight.checks import PreflightError
from miles_core.runs.directory import RunDir
from miles_core.runs.files import read_json

SHAPE = {
    "model_type": "qwen3",
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "vocab_size": 320,
    "intermediate_size": 576,
}
WRONG = [
    ({"pipeline_model_parallel_size": "3", "num_trainer_ranks": "3"}, "num_trainer_ranks"),
    ({"tensor_model_parallel_size": "5", "num_trainer_ranks": "5"}, "num_trainer_ranks"),
    ({"expert_model_parallel_size": "2", "num_trainer_ranks": "2"}, "num_trainer_ranks"),
    ({"lora_rank": "4", "target_modules": "q_a_proj"}, "target_modules"),
]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model that its recipe made before, with a chat template of a known kind."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(SHAPE))
    answer = {"made": False, "path": str(model)}
    monkeypatch.setattr(tasks.prepare, "run_module", lambda *_: answer)
    monkeypatch.setattr("miles_core.preflight.checks.load_family", lambda *_: None)
    return model


def prepare(folder: Path, flags: dict[str, Any]) -> RunDir:
    config = load_config("quickstart", flags, {}).config
    run = RunDir.create(folder / "run", config, {})
    assert tasks.prepare.prepare_model.fn(run, config, lambda: None) == folder / "model"
    return run


@pytest.mark.parametrize(("flags", "field"), WRONG, ids=lambda value: str(value)[:40])
def test_what_does_not_fit_a_made_model_ends_its_preparation(
    made: Path, flags: dict[str, str], field: str
) -> None:
    with pytest.raises(PreflightError) as caught:
        prepare(made.parent, flags)
    assert [problem.field for problem in caught.value.problems] == [f"training.{field}"]


def test_what_fits_is_recorded(made: Path) -> None:
    flags = {"pipeline_model_parallel_size": "2", "num_trainer_ranks": "2", "lora_rank": "4"}
    run = prepare(made.parent, flags)
    assert read_json(run.path / "inputs.json")["hf_checkpoint"] == str(made)
