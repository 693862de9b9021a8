"""Weights between Hugging Face names and this rank's megatron parameters."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file

from miles_core.modeling import parallel
from miles_core.modeling.gpt import PolicyModel
from miles_core.modeling.hf_config import ModelSpec

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


def _layer_names(layer: int, qk_norm: bool) -> Iterator[tuple[str, str]]:
    """(megatron, Hugging Face) names of the tensors that are copied as they are."""
    ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
    yield ours + "input_layernorm.weight", theirs + "input_layernorm.weight"
    yield ours + "pre_mlp_layernorm.weight", theirs + "post_attention_layernorm.weight"
    if qk_norm:
        for x in "qk":
            yield (
                ours + f"self_attention.{x}_layernorm.weight",
                theirs + f"self_attn.{x}_norm.weight",
            )


def _join_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: ModelSpec) -> torch.Tensor:
    """megatron's rows: for each key-value head its query heads, then its key, then its value."""
    groups, hidden = spec.num_kv_heads, q.shape[1]
    parts = [x.reshape(groups, -1, hidden) for x in (q, k, v)]
    return torch.cat(parts, dim=1).reshape(-1, hidden)


def _split_qkv(qkv: torch.Tensor, spec: ModelSpec) -> list[torch.Tensor]:
    """Inverse of `_join_qkv`."""
    groups, size, hidden = spec.num_kv_heads, spec.head_dim, qkv.shape[1]
    queries = spec.num_heads // groups * size
    parts = qkv.reshape(groups, -1, hidden).split([queries, size, size], dim=1)
    return [x.reshape(-1, hidden) for x in parts]


@torch.no_grad()
def load_hf(model: PolicyModel, spec: ModelSpec, tensor: Lookup) -> None:
    """Fill the model from Hugging Face tensors; raises when a parameter is left without a value."""
    group = parallel.tp_group()
    rank, size = group.rank(), group.size()
    params = dict(model.named_parameters())

    def put(name: str, *parts: torch.Tensor, dim: int | None = None) -> None:
        if dim is not None:
            parts = tuple(part.chunk(size, dim)[rank] for part in parts)
        value = torch.cat(parts) if len(parts) > 1 else parts[0]
        param = params.pop(name)
        if param.shape != value.shape:
            raise ValueError(f"{name} has shape {tuple(param.shape)}, not {tuple(value.shape)}")
        param.copy_(value)

    put("embedding.word_embeddings.weight", tensor("model.embed_tokens.weight"), dim=0)
    put("decoder.final_layernorm.weight", tensor("model.norm.weight"))
    if not spec.tied:
        put("output_layer.weight", tensor("lm_head.weight"), dim=0)
    for layer in range(spec.num_layers):
        ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        for name, source in _layer_names(layer, spec.qk_norm):
            put(name, tensor(source))
        q, k, v = (tensor(theirs + f"self_attn.{x}_proj.weight") for x in "qkv")
        put(ours + "self_attention.linear_qkv.weight", _join_qkv(q, k, v, spec), dim=0)
        put(
            ours + "self_attention.linear_proj.weight",
            tensor(theirs + "self_attn.o_proj.weight"),
            dim=1,
        )
        gate, up = (tensor(theirs + f"mlp.{x}_proj.weight") for x in ("gate", "up"))
        put(ours + "mlp.linear_fc1.weight", gate, up, dim=0)
        put(ours + "mlp.linear_fc2.weight", tensor(theirs + "mlp.down_proj.weight"), dim=1)
    if params:
        raise ValueError(f"no Hugging Face tensor fills {sorted(params)}")


@torch.no_grad()
def to_hf(model: PolicyModel, spec: ModelSpec) -> dict[str, torch.Tensor]:
    """All tensors under Hugging Face names, on the CPU. Collective over tensor parallelism."""
    group = parallel.tp_group()
    params = dict(model.named_parameters())
    out: dict[str, torch.Tensor] = {}

    def shards(name: str) -> list[torch.Tensor]:
        own = params[name].detach().contiguous()
        if group.size() == 1:
            return [own]
        parts = [torch.empty_like(own) for _ in range(group.size())]
        dist.all_gather(parts, own, group=group)
        return parts

    def put(name: str, value: torch.Tensor) -> None:
        out[name] = value.detach().to("cpu", copy=True).contiguous()

    put("model.embed_tokens.weight", torch.cat(shards("embedding.word_embeddings.weight")))
    put("model.norm.weight", params["decoder.final_layernorm.weight"])
    if not spec.tied:
        put("lm_head.weight", torch.cat(shards("output_layer.weight")))
    for layer in range(spec.num_layers):
        ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        for name, target in _layer_names(layer, spec.qk_norm):
            put(target, params[name])
        qkv = _split_qkv(torch.cat(shards(ours + "self_attention.linear_qkv.weight")), spec)
        for x, value in zip("qkv", qkv, strict=True):
            put(theirs + f"self_attn.{x}_proj.weight", value)
        put(
            theirs + "self_attn.o_proj.weight",
            torch.cat(shards(ours + "self_attention.linear_proj.weight"), dim=1),
        )
        halves = [part.chunk(2) for part in shards(ours + "mlp.linear_fc1.weight")]
        put(theirs + "mlp.gate_proj.weight", torch.cat([gate for gate, _ in halves]))
        put(theirs + "mlp.up_proj.weight", torch.cat([up for _, up in halves]))
        put(
            theirs + "mlp.down_proj.weight",
            torch.cat(shards(ours + "mlp.linear_fc2.weight"), dim=1),
        )
    return out


def write_hf(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write model.safetensors and bring the dtype in config.json (already there) in line."""
    weights = directory / "model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(0o644)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = str(tensors["model.embed_tokens.weight"].dtype).removeprefix("torch.")
    path.write_text(json.dumps(config, indent=2) + "\n")
