"""Llama, for example SmolLM2."""

from __future__ import annotations

from typing import Any

from miles_core.modeling.hf_config import ModelSpec, common_values, refuse


def read(config: dict[str, Any]) -> ModelSpec:
    refuse(config, "attention_bias")
    return ModelSpec(**common_values(config), qk_norm=False)
