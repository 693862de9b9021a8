"""Qwen3, dense."""

from __future__ import annotations

from typing import Any

from miles_core.modeling.hf_config import ModelSpec, common_values, refuse


def read(config: dict[str, Any]) -> ModelSpec:
    refuse(config, "attention_bias")
    return ModelSpec(**common_values(config, head_dim=128), qk_norm=True)
