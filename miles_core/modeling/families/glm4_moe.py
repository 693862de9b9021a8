"""GLM-4.5 style: grouped-query attention with biases and half-rotated heads, sigmoid router.

Layers for multi-token prediction, which a checkpoint may hold after the last layer, are left out.
"""

from __future__ import annotations

from typing import Any

from miles_core.modeling.hf_config import ModelSpec, MoeSpec, UnsupportedModel, common_values


def read(config: dict[str, Any]) -> ModelSpec:
    layers, dense = config["num_hidden_layers"], config.get("first_k_dense_replace", 1)
    return ModelSpec(
        **common_values({"partial_rotary_factor": 0.5, **config}),
        qk_norm=bool(config.get("use_qk_norm", False)),
        qkv_bias=bool(config.get("attention_bias", False)),
        moe=sigmoid_router(config, tuple(i >= dense for i in range(layers))),
    )


def sigmoid_router(config: dict[str, Any], sparse: tuple[bool, ...]) -> MoeSpec:
    """The router of both GLM families: sigmoid scores, a bias for the choice, a shared expert."""
    if config.get("n_group", 1) != 1:
        raise UnsupportedModel("groups of experts (n_group above 1) are not supported")
    if not config.get("norm_topk_prob", True) or config["num_experts_per_tok"] < 2:
        raise UnsupportedModel("scores of a sigmoid router must be normalised over two or more")
    return MoeSpec(
        num_experts=config["n_routed_experts"],
        top_k=config["num_experts_per_tok"],
        ffn_size=config["moe_intermediate_size"],
        sparse=sparse,
        sigmoid=True,
        bias=True,
        scale=float(config.get("routed_scaling_factor", 1.0)),
        shared_ffn_size=config["moe_intermediate_size"] * (config.get("n_shared_experts") or 0),
    )
