"""What the engine needs to know of a model directory: sizes, rotary base, end tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_core.errors import UserError

_MOE = "Qwen3MoeForCausalLM"
# Whether queries and keys have norms.
ARCHITECTURES = {"Qwen3ForCausalLM": True, _MOE: True, "LlamaForCausalLM": False}


class ModelDirectoryError(UserError):
    """A model directory that cannot be served; the message names the file and the field."""


@dataclass(frozen=True)
class ExpertShape:
    """`count` experts of width `inner`, of which a token goes to `chosen`; `normalize`: their
    scores sum to 1. `sparse` says of each layer whether it has experts."""

    count: int
    chosen: int
    inner: int
    normalize: bool
    sparse: tuple[bool, ...]


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder; `qk_norm` tells Qwen3 (true) from Llama (false)."""

    architecture: str
    qk_norm: bool
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    eps: float
    rope_theta: float
    tied: bool
    context_length: int
    experts: ExpertShape | None = None

    def sparse(self, layer: int) -> bool:
        """Whether the layer has experts."""
        return self.experts is not None and self.experts.sparse[layer]


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a model directory."""
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ModelDirectoryError(
            f"{path} does not exist", "give a Hugging Face model directory"
        ) from error
    except (OSError, ValueError) as error:
        raise ModelDirectoryError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelDirectoryError(f"{path} does not hold a JSON object")
    return value


def _number(config: dict[str, Any], path: Path, field: str, default: Any = None) -> Any:
    value = config.get(field)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
        raise ModelDirectoryError(f"{path}: field {field} must be a positive number, not {value!r}")
    return value


def _rope_theta(config: dict[str, Any], path: Path) -> float:
    """The rotary base, from `rope_parameters` (transformers 5) or the older flat field."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ModelDirectoryError(f"{path}: field rope_parameters must be an object")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ModelDirectoryError(
            f"{path}: field rope_parameters.rope_type {kind!r} is unsupported"
        )
    flat = config.get("rope_theta")
    if "rope_theta" in rope:
        return float(_number(rope, path, "rope_theta"))
    return float(_number({"rope_theta": flat}, path, "rope_theta", 10000.0))


def read_shape(directory: Path) -> ModelShape:
    """Sizes from `config.json`.

    Raises:
        ModelDirectoryError: the file is missing or broken, or a field has an unsupported value.
    """
    path = directory / "config.json"
    config = read_json(path)
    names = config.get("architectures") or []
    name = names[0] if isinstance(names, list) and names else None
    if name not in ARCHITECTURES:
        raise ModelDirectoryError(
            f"{path}: field architectures {names!r} is unsupported",
            f"the embedded engine serves {', '.join(ARCHITECTURES)}",
        )
    for field in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if config.get(field):
            raise ModelDirectoryError(f"{path}: field {field} must be false")
    if config.get("hidden_act", "silu") != "silu":
        raise ModelDirectoryError(f"{path}: field hidden_act must be silu")
    hidden = int(_number(config, path, "hidden_size"))
    heads = int(_number(config, path, "num_attention_heads"))
    default_head = 128 if name == "Qwen3ForCausalLM" else hidden // heads
    shape = ModelShape(
        architecture=name,
        qk_norm=ARCHITECTURES[name],
        layers=int(_number(config, path, "num_hidden_layers")),
        hidden=hidden,
        intermediate=int(_number(config, path, "intermediate_size")),
        heads=heads,
        kv_heads=int(_number(config, path, "num_key_value_heads", heads)),
        head_dim=int(_number(config, path, "head_dim", default_head)),
        vocab=int(_number(config, path, "vocab_size")),
        eps=float(_number(config, path, "rms_norm_eps", 1e-6)),
        rope_theta=_rope_theta(config, path),
        tied=bool(config.get("tie_word_embeddings", False)),
        context_length=int(_number(config, path, "max_position_embeddings")),
        experts=_experts(config, path) if name == _MOE else None,
    )
    if shape.heads % shape.kv_heads:
        raise ModelDirectoryError(
            f"{path}: field num_attention_heads ({shape.heads}) must be a multiple of "
            f"num_key_value_heads ({shape.kv_heads})"
        )
    return shape


def _experts(config: dict[str, Any], path: Path) -> ExpertShape | None:
    """None where no layer has experts."""
    layers, step = (
        int(_number(config, path, field, default))
        for field, default in (("num_hidden_layers", None), ("decoder_sparse_step", 1))
    )
    dense = config.get("mlp_only_layers") or []
    sparse = tuple(i not in dense and (i + 1) % step == 0 for i in range(layers))
    field = "num_local_experts" if config.get("num_local_experts") else "num_experts"
    shape = ExpertShape(
        count=int(_number(config, path, field)),
        chosen=int(_number(config, path, "num_experts_per_tok")),
        inner=int(_number(config, path, "moe_intermediate_size")),
        normalize=bool(config.get("norm_topk_prob", False)),
        sparse=sparse,
    )
    if shape.chosen > shape.count:
        raise ModelDirectoryError(
            f"{path}: field num_experts_per_tok ({shape.chosen}) is above {field} ({shape.count})"
        )
    return shape if any(sparse) else None


def read_eos(directory: Path) -> frozenset[int]:
    """End tokens: `eos_token_id` of `generation_config.json`, else of `config.json`."""
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        if not path.exists():
            continue
        value = read_json(path).get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(token, int) for token in ids):
            raise ModelDirectoryError(f"{path}: field eos_token_id must hold integers")
        return frozenset(ids)
    return frozenset()
