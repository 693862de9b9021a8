"""What each weight is to tensor parallelism, as megatron says it when it draws the weights."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import MODELS, make_moe
from trainer_helpers import make_hf

from miles_core.modeling import parallel
from miles_core.modeling.gpt import PolicyModel
from miles_core.modeling.hf_config import read_spec
from miles_core.modeling.model_config import transformer_config

MARKS = ("tensor_model_parallel", "partition_dim", "allreduce", "sequence_parallel", "shared")


def marks(model: PolicyModel) -> dict[str, dict[str, Any]]:
    return {
        name: {mark: getattr(param, mark, None) for mark in MARKS}
        for name, param in model.named_parameters()
    }


@pytest.mark.parametrize("kind", ["tied", "untied", *MODELS])
def test_weights_that_are_not_drawn_are_marked_alike(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = kind in ("tied", "untied")
    hf = make_hf(tmp_path, tied=kind == "tied") if dense else make_moe(tmp_path, kind)
    spec = read_spec(hf)
    parallel.start(0, 1, "127.0.0.1", 0, 1, seed=1)
    try:
        config = transformer_config(spec, 1, torch.float32)
        got = marks(PolicyModel(spec, config))
        monkeypatch.setattr("miles_core.modeling.gpt.mark_cut", lambda model: None)
        want = marks(PolicyModel(spec, replace(config, perform_initialization=True)))
    finally:
        parallel.stop()
    assert got == want
    assert {str(mark["tensor_model_parallel"]) for mark in want.values()} == {"True", "None"}
