"""What a Hugging Face directory says about its model, checked for what is supported."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class UnsupportedModel(ValueError):
    """A Hugging Face model that cannot be mapped; the message names the reason."""


@dataclass(frozen=True)
class MoeSpec:
    """Mixture of experts: softmax (`sigmoid` false) or sigmoid scores, the `top_k` best chosen.

    `normalize`: the chosen scores sum to 1 before they are multiplied by `scale`. `sparse` says of
    each layer whether it has experts. `shared_ffn_size` 0: no shared expert. With `bias` a
    constant per expert is added to the scores for the choice alone.
    """

    num_experts: int
    top_k: int
    ffn_size: int
    sparse: tuple[bool, ...]
    normalize: bool = True
    sigmoid: bool = False
    bias: bool = False
    scale: float = 1.0
    shared_ffn_size: int = 0


@dataclass(frozen=True)
class MlaSpec:
    """Multi-head latent attention (arXiv 2405.04434): ranks of the latents and sizes of a head.

    `q_rank` None: queries are projected from the hidden state directly.
    """

    q_rank: int | None
    kv_rank: int
    plain_dim: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True)
class ModelSpec:
    """Shape of a decoder-only model with RMSNorm, SwiGLU and rotary positions."""

    model_type: str
    vocab_size: int
    hidden_size: int
    ffn_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    max_positions: int
    qk_norm: bool
    tied: bool
    qkv_bias: bool = False
    rope_share: float = 1.0
    moe: MoeSpec | None = None
    mla: MlaSpec | None = None

    def sparse(self, layer: int) -> bool:
        """Whether the layer has experts."""
        return self.moe is not None and self.moe.sparse[layer]


def rope_values(config: dict[str, Any]) -> dict[str, Any]:
    """`rope_theta` and the rotated share of a head, `rope_share`."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise UnsupportedModel(f"rope_type {kind!r} is not supported, only 'default'")
    share = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    theta = rope.get("rope_theta") or config.get("rope_theta") or 10000.0
    return {"rope_theta": float(theta), "rope_share": float(share)}


def common_values(config: dict[str, Any], head_dim: int | None = None) -> dict[str, Any]:
    """Fields of ModelSpec that all families write alike; `head_dim` is the family's default."""
    heads = config["num_attention_heads"]
    return {
        "model_type": config["model_type"],
        "vocab_size": config["vocab_size"],
        "hidden_size": config["hidden_size"],
        "ffn_size": config["intermediate_size"],
        "num_layers": config["num_hidden_layers"],
        "num_heads": heads,
        "num_kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or head_dim or config["hidden_size"] // heads,
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "max_positions": config.get("max_position_embeddings", 32768),
        "tied": bool(config.get("tie_word_embeddings", False)),
        **rope_values(config),
    }


def refuse(config: dict[str, Any], *flags: str) -> None:
    """Raise UnsupportedModel for the first of the flags that is set."""
    for flag in flags:
        if config.get(flag):
            raise UnsupportedModel(f"{flag} is not supported for {config['model_type']}")


def read_spec(hf_dir: str | Path) -> ModelSpec:
    """The model of a directory with config.json.

    Raises FileNotFoundError without a config.json and UnsupportedModel for another architecture.
    """
    from miles_core.modeling.families import FAMILIES

    path = Path(hf_dir) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; is {hf_dir} a Hugging Face directory?")
    config = json.loads(path.read_text())
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise UnsupportedModel(
            f"{path}: model_type {kind!r} is not supported, only {', '.join(FAMILIES)}"
        )
    try:
        refuse(config, "mlp_bias", "use_sliding_window")
        if config.get("hidden_act", "silu") != "silu":
            raise UnsupportedModel(f"hidden_act {config['hidden_act']!r} is not supported")
        return FAMILIES[kind].read(config)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{path}: {error}") from None
