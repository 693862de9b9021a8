"""Adapters against PEFT on the same models: names, logits, gradients, and the way back."""

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from trainer_helpers import VOCAB, make_hf, to_hf
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parent.parent / "modeling"))
from family_models import MODELS, make_moe

from miles_core.config.lora import LoraSettings, possible_modules
from miles_core.modeling import lora, parallel
from miles_core.modeling.gpt import build_model
from miles_core.modeling.hf_config import read_spec
from miles_core.modeling.hf_weights import HFReader, load_hf

SIZES = [9, 1, 20, 14]


@pytest.fixture(autouse=True)
def groups() -> Iterator[None]:
    parallel.start(0, 1, "127.0.0.1", 0, 1, seed=1)
    yield
    parallel.stop()


def make(directory: Path, kind: str) -> Path:
    return make_moe(directory, kind) if kind in MODELS else make_hf(directory, kind)


def adapted(path: Path, settings: LoraSettings, dtype: torch.dtype = torch.float32) -> Any:
    spec = read_spec(path)
    model = build_model(spec, 1, dtype)
    lora.attach(model, spec, settings)
    load_hf(model, spec, HFReader(path))
    return model


def peft_model(path: Path, settings: LoraSettings, modules: list[str]) -> Any:
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=modules,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), config
    ).eval()


def fill(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    """Random values on both sides."""
    with torch.no_grad():
        for name, value in ours.items():
            value.normal_(0, 0.1)
            theirs[name].copy_(value)


def pair(path: Path, settings: LoraSettings) -> tuple[Any, Any, dict[str, Any], dict[str, Any]]:
    """Both models and their adapters, which have the same names and values."""
    model = adapted(path, settings)
    ours = {tensor.name: tensor.value for tensor in model.lora.tensors()}
    reference = peft_model(path, settings, list(settings.modules) or list(possible_modules(path)))
    theirs = {
        name.replace(".default.", "."): parameter
        for name, parameter in reference.named_parameters()
        if parameter.requires_grad
    }
    assert ours.keys() == theirs.keys()
    assert {n: v.shape for n, v in ours.items()} == {n: v.shape for n, v in theirs.items()}
    fill(ours, theirs)
    return model, reference, ours, theirs


@pytest.mark.parametrize("modules", [(), ("q_proj", "o_proj"), ("v_proj", "up_proj")])
@pytest.mark.parametrize("kind", ["qwen3", "llama", *MODELS])
def test_logits_and_gradients_are_those_of_peft(
    kind: str, modules: tuple[str, ...], tmp_path: Path
) -> None:
    path = make(tmp_path / "hf", kind)
    if not set(modules) <= set(possible_modules(path)):
        with pytest.raises(ValueError, match="target_modules"):
            adapted(path, LoraSettings(4, 12.0, modules))
        return
    model, reference, ours, theirs = pair(path, LoraSettings(4, 12.0, modules))
    texts = [torch.randint(0, VOCAB, (n,)) for n in SIZES]
    packed = model.packed_logits(torch.cat(texts), SIZES)
    alone = torch.cat([reference(text[None]).logits[0] for text in texts])
    scale = alone.abs().max().item()
    assert (packed - alone).abs().max().item() <= 5e-6 * scale
    direction = torch.randn_like(packed)
    (packed * direction).sum().backward()
    (alone * direction).sum().backward()
    for name, value in ours.items():
        largest = theirs[name].grad.abs().max().item()
        assert largest > 0, name
        assert (value.grad - theirs[name].grad).abs().max().item() <= 1e-4 * largest, name
    trained = {n for n, p in model.named_parameters() if p.requires_grad or p.grad is not None}
    assert len(trained) == len(ours) and all(".adapter." in name for name in trained)


@pytest.mark.parametrize(
    ("kind", "modules"),
    [
        ("qwen3", ()),
        ("qwen3", ("k_proj", "up_proj")),
        ("glm4_moe", ()),
        ("glm4_moe_lite", ()),
    ],
)
def test_merged_weights_are_those_of_peft(
    kind: str, modules: tuple[str, ...], tmp_path: Path
) -> None:
    path = make(tmp_path / "hf", kind)
    model, reference, _, _ = pair(path, LoraSettings(4, 12.0, modules))
    reference.merge_and_unload().save_pretrained(tmp_path / "merged")
    want = HFReader(tmp_path / "merged")
    got, before = to_hf(model, read_spec(path)), HFReader(path)
    changed = set()
    for name, value in got.items():
        assert torch.allclose(value, want(name), atol=1e-6), name
        if not torch.equal(value, before(name)):
            changed.add(name)
    assert changed == {f"{module}.weight" for module in model.lora.modules}


def test_a_new_adapter_changes_nothing_and_begins_as_pefts(tmp_path: Path) -> None:
    path = make_hf(tmp_path / "hf")
    model = adapted(path, LoraSettings(4, 8.0))
    for tensor in model.lora.tensors():
        if tensor.name.endswith("lora_B.weight"):
            assert not tensor.value.any()
            continue
        bound = 1 / math.sqrt(tensor.value.shape[1])
        largest = tensor.value.abs().max().item()
        assert 0.9 * bound < largest <= bound, tensor.name
        assert tensor.value.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.2)
    exported = to_hf(model, read_spec(path))
    source = HFReader(path)
    assert all(torch.equal(value, source(name)) for name, value in exported.items())
    other = adapted(path, LoraSettings(4, 8.0, seed=1))
    same = adapted(path, LoraSettings(4, 8.0))
    pairs = zip(model.lora.tensors(), same.lora.tensors(), other.lora.tensors(), strict=True)
    for a, b, c in pairs:
        assert torch.equal(a.value, b.value)
        assert torch.equal(a.value, c.value) == a.name.endswith("lora_B.weight")
    values = [t.value for t in model.lora.tensors() if t.name.endswith("q_proj.lora_A.weight")]
    assert not torch.equal(values[0], values[1])


def test_without_its_adapter_the_model_is_the_base(tmp_path: Path) -> None:
    path = make_moe(tmp_path / "hf", "glm4_moe_lite")
    settings = LoraSettings(4, 8.0)
    model = adapted(path, settings)
    text = torch.randint(0, VOCAB, (20,))
    begun = model.packed_logits(text, [20])
    with torch.no_grad():
        for tensor in model.lora.tensors():
            tensor.value.normal_(0, 0.1)
    trained = model.packed_logits(text, [20])
    with model.lora.off():
        base = model.packed_logits(text, [20])
    assert torch.equal(base, begun) and not torch.allclose(trained, base, atol=1e-3)
    assert torch.equal(model.packed_logits(text, [20]), trained)


def test_bfloat16_keeps_the_base_and_rounds_the_merged_weights_once(tmp_path: Path) -> None:
    path = make_hf(tmp_path / "hf")
    model = adapted(path, LoraSettings(4, 8.0), torch.bfloat16)
    before = {name: value.clone() for name, value in model.stored_tensors()}
    with torch.no_grad():
        for tensor in model.lora.tensors():
            assert tensor.value.dtype == torch.bfloat16
            tensor.value.normal_(0, 0.1)
    exported = to_hf(model, read_spec(path))
    assert all(torch.equal(value, before[name]) for name, value in model.stored_tensors())
    name = "model.layers.1.mlp.down_proj.weight"
    a, b = (
        {t.name: t.value for t in model.lora.tensors()}[
            f"base_model.model.model.layers.1.mlp.down_proj.lora_{x}.weight"
        ].float()
        for x in "AB"
    )
    base = HFReader(path)(name).to(torch.bfloat16).float()
    assert torch.equal(exported[name], (base + 2 * (b @ a)).to(torch.bfloat16))


@pytest.mark.parametrize("kind", ["qwen3", "llama", *MODELS])
def test_the_configuration_knows_the_layers_that_the_trainer_finds(
    kind: str, tmp_path: Path
) -> None:
    path = make(tmp_path / "hf", kind)
    spec = read_spec(path)
    found = {
        module.rpartition(".")[2]
        for target in lora.targets(spec, LoraSettings(4, 8.0))
        for module in target.modules
        if module
    }
    assert found == set(possible_modules(path))
