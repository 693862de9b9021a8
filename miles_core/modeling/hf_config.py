"""What a Hugging Face directory says about its model, checked for what is supported."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUPPORTED = ("qwen3", "llama")


class UnsupportedModel(ValueError):
    """A Hugging Face model that cannot be mapped; the message names the reason."""


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


def _rope_theta(config: dict[str, Any]) -> float:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise UnsupportedModel(f"rope_type {kind!r} is not supported, only 'default'")
    return float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)


def read_spec(hf_dir: str | Path) -> ModelSpec:
    """The model of a directory with config.json.

    Raises FileNotFoundError without a config.json and UnsupportedModel for another architecture.
    """
    path = Path(hf_dir) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; is {hf_dir} a Hugging Face directory?")
    config = json.loads(path.read_text())
    kind = config.get("model_type")
    if kind not in SUPPORTED:
        raise UnsupportedModel(
            f"{path}: model_type {kind!r} is not supported, only {', '.join(SUPPORTED)}"
        )
    for flag in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if config.get(flag):
            raise UnsupportedModel(f"{path}: {flag} is not supported")
    if config.get("hidden_act", "silu") != "silu":
        raise UnsupportedModel(f"{path}: hidden_act {config['hidden_act']!r} is not supported")
    heads = config["num_attention_heads"]
    default_head = 128 if kind == "qwen3" else config["hidden_size"] // heads
    return ModelSpec(
        model_type=kind,
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        ffn_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or default_head,
        norm_eps=config.get("rms_norm_eps", 1e-6),
        rope_theta=_rope_theta(config),
        max_positions=config.get("max_position_embeddings", 32768),
        qk_norm=kind == "qwen3",
        tied=bool(config.get("tie_word_embeddings", False)),
    )
