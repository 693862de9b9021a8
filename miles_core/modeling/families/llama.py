"""Llama, for example SmolLM2."""

from __future__ import annotations

from typing import Any

from miles_core.modeling.hf_config import ModelSpec, common_values, positive, refuse


def read(config: dict[str, Any]) -> ModelSpec:
    refuse(config, "attention_bias")
    heads = positive(config, "num_attention_heads")
    return ModelSpec(**common_values(config, kv_heads=heads), qk_norm=False)
