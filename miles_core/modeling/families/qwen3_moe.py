"""Qwen3 with experts: Qwen3's attention, softmax router, no shared expert."""

from __future__ import annotations

from typing import Any

from miles_core.modeling.hf_config import ModelSpec, MoeSpec, common_values, refuse


def read(config: dict[str, Any]) -> ModelSpec:
    refuse(config, "attention_bias")
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    layers = config["num_hidden_layers"]
    moe = MoeSpec(
        num_experts=config.get("num_local_experts") or config["num_experts"],
        top_k=config["num_experts_per_tok"],
        ffn_size=config["moe_intermediate_size"],
        sparse=tuple(i not in dense and (i + 1) % step == 0 for i in range(layers)),
        normalize=bool(config.get("norm_topk_prob", False)),
    )
    return ModelSpec(**common_values(config), qk_norm=True, moe=moe)
