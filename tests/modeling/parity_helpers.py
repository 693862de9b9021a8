"""Comparisons of a megatron model with transformers'."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from trainer_helpers import to_hf

from miles_core.modeling.gpt import build_model
from miles_core.modeling.hf_config import read_spec
from miles_core.modeling.hf_weights import HFReader, load_hf


@dataclass(frozen=True)
class Parity:
    """Largest difference of logits over the largest logit; of a gradient over the largest of its
    tensor, in the tensor `worst_gradient`; whether the export is the source bit for bit."""

    logits: float
    gradients: float
    worst_gradient: str
    exported_alike: bool


def random_model(directory: Path, name: str, values: dict[str, Any], seed: int) -> Path:
    """A random model of transformers' classes `name`, norms, biases and routers included."""
    import transformers

    torch.manual_seed(seed)
    config = getattr(transformers, f"{name}Config")(**values)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for label, param in model.named_parameters():
            mean, std = (1.0, 0.2) if "norm" in label else (0.0, 0.15)
            torch.nn.init.normal_(param, mean, std)
        for label, buffer in model.named_buffers():
            if "correction_bias" in label:
                buffer.normal_(0.0, 0.3)
    model.save_pretrained(directory)
    return directory


def source_tensors(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a directory that hold anything."""
    found: dict[str, torch.Tensor] = {}
    for file in path.glob("*.safetensors"):
        found |= {name: value for name, value in load_file(file).items() if value.numel()}
    return found


def measure(path: Path, sizes: list[int], seed: int = 0) -> Parity:
    """A directory's model by megatron, packed, and by transformers, text by text, in float32."""
    from transformers import AutoModelForCausalLM

    spec = read_spec(path)
    model = build_model(spec, 1, torch.float32)
    load_hf(model, spec, HFReader(path))
    exported, source = to_hf(model, spec), source_tensors(path)
    alike = set(exported) == set(source) and all(
        torch.equal(exported[name], value) for name, value in source.items()
    )
    # the default for experts wants sizes that are multiples of 16 bytes
    reference = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, experts_implementation="eager"
    )
    generator = torch.Generator().manual_seed(seed)
    texts = [torch.randint(spec.vocab_size, (n,), generator=generator) for n in sizes]
    ours = model.packed_logits(torch.cat(texts), sizes)
    theirs = torch.cat([reference(text[None]).logits[0] for text in texts])
    logits = ((ours - theirs).abs().max() / theirs.abs().max()).item()
    direction = torch.randn(ours.shape, generator=generator)
    (ours * direction).sum().backward()
    (theirs * direction).sum().backward()
    worst, name = gradient_difference(model, reference, path)
    return Parity(logits, worst, name, alike)


def gradient_difference(model: Any, reference: Any, path: Path) -> tuple[float, str]:
    """Largest difference of a gradient over the largest value of its tensor, and the tensor.

    Both gradients in transformers' own checkpoint layout, every tensor of it; they replace the
    weights of both models.
    """
    with torch.no_grad():
        for param in reference.parameters():
            param.copy_(torch.zeros_like(param) if param.grad is None else param.grad)
        for buffer in reference.buffers():
            buffer.zero_()
        for param in model.parameters():
            param.copy_(torch.zeros_like(param) if param.grad is None else param.grad)
    with tempfile.TemporaryDirectory() as folder:
        reference.save_pretrained(folder)
        want = source_tensors(Path(folder))
    got = to_hf(model, read_spec(path))
    assert set(got) == set(want)
    differences = {}
    for name, value in want.items():
        if "correction_bias" not in name:
            largest = value.abs().max().item()
            assert largest > 0 or "experts" in name, name
            # a gradient of zero has no scale of its own
            differences[name] = (got[name] - value).abs().max().item() / max(largest, 1e-4)
    worst = max(differences, key=differences.__getitem__)
    return differences[worst], worst


def compare_gradients(model: Any, reference: Any, path: Path) -> None:
    """Every gradient within 1e-3 of the largest value of its tensor."""
    difference, name = gradient_difference(model, reference, path)
    assert difference <= 1e-3, name
