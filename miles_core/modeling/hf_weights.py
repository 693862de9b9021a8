"""Hugging Face tensors into this rank's megatron parameters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open

from miles_core.modeling import parallel
from miles_core.modeling.families import EMBEDDING, weights
from miles_core.modeling.gpt import PolicyModel
from miles_core.modeling.hf_config import ModelSpec
from miles_core.modeling.mapping import Weight

Lookup = Callable[[str], torch.Tensor]


class HFReader:
    """Tensors of a Hugging Face directory by name, read when they are asked for."""

    def __init__(self, hf_dir: str | Path) -> None:
        self._dir = Path(hf_dir)
        files = sorted(self._dir.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"{hf_dir} holds no .safetensors file")
        self._file_of: dict[str, Path] = {}
        for file in files:
            with safe_open(file, framework="pt") as reader:
                self._file_of.update(dict.fromkeys(reader.keys(), file))

    def __call__(self, name: str) -> torch.Tensor:
        file = self._file_of.get(name)
        if file is None:
            raise KeyError(f"{self._dir} holds no tensor {name!r}")
        with safe_open(file, framework="pt") as reader:
            return reader.get_tensor(name)


def own_tensors(model: PolicyModel) -> dict[str, torch.Tensor]:
    """Parameters and router biases of this rank under their names in the whole model, without
    adapters."""
    return {model.global_name(name): tensor for name, tensor in model.stored_tensors()}


def cutting_group(weight: Weight) -> dist.ProcessGroup:
    """The ranks that a weight is cut over."""
    return parallel.expert_tp_group() if weight.expert else parallel.tp_group()


@torch.no_grad()
def load_hf(
    model: PolicyModel, spec: ModelSpec, tensor: Lookup, leave_out: str | None = None
) -> None:
    """Fill the model from Hugging Face tensors, but for the parameter called `leave_out`; raises
    when another one is left without a value."""
    own = own_tensors(model)
    own.pop(leave_out or "", None)

    def put(name: str, weight: Weight) -> None:
        target = own.pop(name)
        group = cutting_group(weight)
        parts = [tensor(source) for source in weight.theirs]
        value = weight.cut.shard(parts, group.rank(), group.size())
        if target.shape != value.shape:
            raise ValueError(f"{name} has shape {tuple(target.shape)}, not {tuple(value.shape)}")
        target.copy_(value)

    for weight in weights(spec):
        names = [weight.ours]
        if spec.tied and weight.ours == EMBEDDING:
            names.append("output_layer.weight")  # once more, on the last pipeline stage
        for name in names:
            if name in own:
                put(name, weight)
    if own:
        raise ValueError(f"no Hugging Face tensor fills {sorted(own)}")
