"""Qwen3 with experts: Qwen3's attention, softmax router, no shared expert."""

from __future__ import annotations

from typing import Any

from miles_core.modeling.hf_config import (
    ModelSpec,
    MoeSpec,
    UnsupportedModel,
    checked,
    common_values,
    positive,
    refuse,
)


def read(config: dict[str, Any]) -> ModelSpec:
    refuse(config, "attention_bias")
    step, dense = positive(config, "decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    layers = positive(config, "num_hidden_layers")
    experts = "num_local_experts" if config.get("num_local_experts") else "num_experts"
    moe = MoeSpec(
        num_experts=positive(config, experts),
        top_k=positive(config, "num_experts_per_tok"),
        ffn_size=positive(config, "moe_intermediate_size"),
        sparse=tuple(i not in dense and (i + 1) % step == 0 for i in range(layers)),
        normalize=bool(config.get("norm_topk_prob", False)),
    )
    if moe.normalize and moe.top_k == 1:
        raise UnsupportedModel("norm_topk_prob with num_experts_per_tok 1 is not supported")
    return ModelSpec(**common_values(config), qk_norm=True, moe=checked(moe))
