"""Comparisons of a megatron model with transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from miles_core.modeling.hf_config import read_spec
from miles_core.modeling.hf_weights import to_hf


def compare_gradients(model: Any, reference: Any, path: Path) -> None:
    """Both gradients in transformers' own checkpoint layout, every tensor of it."""
    with torch.no_grad():
        for param in reference.parameters():
            param.copy_(torch.zeros_like(param) if param.grad is None else param.grad)
        for buffer in reference.buffers():
            buffer.zero_()
        for param in model.parameters():
            param.copy_(torch.zeros_like(param) if param.grad is None else param.grad)
    reference.save_pretrained(path.parent / "gradients")
    want = load_file(path.parent / "gradients" / "model.safetensors")
    got = to_hf(model, read_spec(path))
    assert set(got) == set(want)
    for name, value in want.items():
        if "correction_bias" not in name:
            largest = value.abs().max().item()
            assert largest > 0 or "experts" in name, name
            assert (got[name] - value).abs().max().item() <= 1e-3 * largest + 1e-7, name
