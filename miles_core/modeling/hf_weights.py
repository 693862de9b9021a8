"""Weights between Hugging Face names and this rank's megatron parameters."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file

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
    """Parameters and router biases of this rank under their names in the whole model."""
    return {model.global_name(name): tensor for name, tensor in model.stored_tensors()}


def _cutting_group(weight: Weight) -> dist.ProcessGroup:
    """The ranks that a weight is cut over."""
    return parallel.expert_tp_group() if weight.expert else parallel.tp_group()


@torch.no_grad()
def load_hf(model: PolicyModel, spec: ModelSpec, tensor: Lookup) -> None:
    """Fill the model from Hugging Face tensors; raises when a parameter is left without a value."""
    own = own_tensors(model)

    def put(name: str, weight: Weight) -> None:
        target = own.pop(name)
        group = _cutting_group(weight)
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


def _first_holders(names: list[str]) -> dict[str, int]:
    """For each tensor the first rank that holds it. Collective."""
    everywhere: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, names)
    holders: dict[str, int] = {}
    for rank, held in enumerate(everywhere):
        for name in held:
            holders.setdefault(name, rank)
    return holders


def _whole(weight: Weight, own: torch.Tensor) -> list[torch.Tensor]:
    """The Hugging Face tensors of a weight that this rank holds, on the CPU."""
    group = _cutting_group(weight)
    shards = [own.detach().contiguous()]
    if group.size() > 1:
        shards = [torch.empty_like(own) for _ in range(group.size())]
        dist.all_gather(shards, own.detach().contiguous(), group=group)
    return [part.to("cpu", copy=True).contiguous() for part in weight.cut.whole(shards)]


@torch.no_grad()
def to_hf(model: PolicyModel, spec: ModelSpec) -> dict[str, torch.Tensor]:
    """All tensors under Hugging Face names, on the CPU of rank 0; elsewhere fewer. Collective."""
    own = own_tensors(model)
    holders = _first_holders(list(own))
    rank = dist.get_rank()
    out: dict[str, torch.Tensor] = {}
    for weight in weights(spec):
        holder = holders[weight.ours]
        parts = _whole(weight, own[weight.ours]) if weight.ours in own else []
        if holder != 0 and rank == holder:
            dist.send_object_list([parts], dst=0, device=parallel.device())
        if holder != 0 and rank == 0:
            received: list[list[torch.Tensor]] = [[]]
            dist.recv_object_list(received, src=holder, device=parallel.device())
            parts = received[0]
        out.update(zip(weight.theirs, parts, strict=False))
    return out


def write_hf(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write model.safetensors and bring the dtype in config.json (already there) in line."""
    weights_file = directory / "model.safetensors"
    save_file(tensors, weights_file, metadata={"format": "pt"})
    weights_file.chmod(0o644)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = str(tensors["model.embed_tokens.weight"].dtype).removeprefix("torch.")
    path.write_text(json.dumps(config, indent=2) + "\n")
