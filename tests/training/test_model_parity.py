"""Megatron models against transformers: logits, gradients, export, log-probabilities."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from trainer_helpers import VOCAB, make_hf, to_hf
from transformers import AutoModelForCausalLM

from miles_core.modeling import parallel
from miles_core.modeling.gpt import build_model
from miles_core.modeling.hf_config import UnsupportedModel, read_spec
from miles_core.modeling.hf_weights import HFReader, load_hf


@pytest.fixture(autouse=True)
def groups() -> Iterator[None]:
    parallel.start(0, 1, "127.0.0.1", 0, 1, seed=1)
    yield
    parallel.stop()


@pytest.fixture(params=[("qwen3", True), ("qwen3", False), ("llama", True), ("llama", False)])
def pair(request: Any, tmp_path: Path) -> tuple[Any, Any, Path]:
    kind, tied = request.param
    path = make_hf(tmp_path / "hf", kind, tied)
    spec = read_spec(path)
    model = build_model(spec, 1, torch.float32)
    load_hf(model, spec, HFReader(path))
    return model, AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), path


SIZES = [9, 1, 20, 14]


def test_logits_gradients_and_export(pair: tuple[Any, Any, Path]) -> None:
    model, reference, path = pair
    texts = [torch.randint(0, VOCAB, (n,)) for n in SIZES]
    packed = model.packed_logits(torch.cat(texts), SIZES)
    alone = torch.cat([reference(t[None]).logits[0] for t in texts])
    scale = alone.abs().max().item()
    assert (packed - alone).abs().max().item() <= 1e-5 * scale
    positions = torch.arange(20)[None]
    dense = model(texts[2][None], positions, None)[0]
    assert (dense - alone[10:30]).abs().max().item() <= 1e-5 * scale
    rows = torch.tensor([3, 12, 40])
    some = model.packed_logits(torch.cat(texts), SIZES, rows)
    assert torch.allclose(some, packed[rows], atol=1e-5)

    direction = torch.randn_like(packed)
    (packed * direction).sum().backward()
    (alone * direction).sum().backward()
    ours = model.embedding.word_embeddings.weight.grad
    theirs = reference.get_input_embeddings().weight.grad
    assert (ours - theirs).abs().max().item() <= 1e-4 * theirs.abs().max().item()
    norm = reference.model.layers[0].input_layernorm.weight.grad
    own = model.decoder.layers[0].input_layernorm.weight.grad
    assert (own - norm).abs().max().item() <= 1e-4 * norm.abs().max().item()

    exported, source = to_hf(model, read_spec(path)), load_file(path / "model.safetensors")
    assert set(exported) == set(source)
    assert all(torch.equal(exported[name], source[name]) for name in source)


def test_another_architecture_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(UnsupportedModel, match="mamba"):
        read_spec(tmp_path)
