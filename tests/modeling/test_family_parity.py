"""Families with experts against transformers: logits, every gradient, export, the sharded file."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import MODELS, VOCAB, make_moe
from parity_helpers import compare_gradients
from safetensors.torch import load_file
from trainer_helpers import to_hf
from transformers import AutoModelForCausalLM

from miles_core.modeling import dist_state, parallel
from miles_core.modeling.gpt import build_model
from miles_core.modeling.hf_config import read_spec
from miles_core.modeling.hf_weights import HFReader, load_hf, own_tensors

SIZES = [9, 1, 20, 14]


@pytest.fixture(autouse=True)
def groups() -> Iterator[None]:
    parallel.start(0, 1, "127.0.0.1", 0, 1, seed=1)
    yield
    parallel.stop()


def loaded(path: Path) -> Any:
    spec = read_spec(path)
    model = build_model(spec, 1, torch.float32)
    load_hf(model, spec, HFReader(path))
    return model


@pytest.mark.parametrize("kind", list(MODELS))
@pytest.mark.parametrize("tied", [False, True])
def test_logits_gradients_and_export(kind: str, tied: bool, tmp_path: Path) -> None:
    path = make_moe(tmp_path / "hf", kind, tied)
    model = loaded(path)
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    texts = [torch.randint(0, VOCAB, (n,)) for n in SIZES]
    packed = model.packed_logits(torch.cat(texts), SIZES)
    alone = torch.cat([reference(t[None]).logits[0] for t in texts])
    scale = alone.abs().max().item()
    # well below 1e-4, so that another epsilon in a norm shows
    assert (packed - alone).abs().max().item() <= 5e-6 * scale
    dense = model(texts[2][None], torch.arange(20)[None], None)[0]
    assert (dense - packed[10:30]).abs().max().item() <= 1e-5 * scale

    exported, source = to_hf(model, read_spec(path)), load_file(path / "model.safetensors")
    assert set(exported) == set(source)
    assert all(torch.equal(exported[name], source[name]) for name in source)

    direction = torch.randn_like(packed)
    (packed * direction).sum().backward()
    (alone * direction).sum().backward()
    compare_gradients(model, reference, path)


@pytest.mark.parametrize("kind", ["qwen3_moe", "glm4_moe", "glm4_moe_lite"])
def test_the_sharded_file_gives_the_model_back(kind: str, tmp_path: Path) -> None:
    model = loaded(make_moe(tmp_path / "hf", kind))
    before = {name: value.detach().clone() for name, value in own_tensors(model).items()}
    (tmp_path / "saved").mkdir()
    dist_state.save(tmp_path / "saved", model)
    with torch.no_grad():
        for value in own_tensors(model).values():
            value.zero_()
    dist_state.load(tmp_path / "saved", model)
    after = own_tensors(model)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert any(name.endswith("expert_bias") for name in after) == ("glm" in kind)
