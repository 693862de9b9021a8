"""GLM-4.5 style: grouped-query attention with biases and half-rotated heads, sigmoid router.

Layers for multi-token prediction, which a checkpoint may hold after the last layer, are left out.
"""

from __future__ import annotations

from typing import Any

from miles_core.modeling.hf_config import (
    ModelSpec,
    MoeSpec,
    UnsupportedModel,
    checked,
    common_values,
    number,
    positive,
)


def read(config: dict[str, Any]) -> ModelSpec:
    layers, dense = positive(config, "num_hidden_layers"), config.get("first_k_dense_replace", 1)
    if type(dense) is not int or dense < 0:
        raise UnsupportedModel(f"field first_k_dense_replace must be a number, not {dense!r}")
    return ModelSpec(
        **common_values(config, norm_eps=1e-5, partial=0.5),
        qk_norm=bool(config.get("use_qk_norm", False)),
        qkv_bias=bool(config.get("attention_bias", False)),
        moe=sigmoid_router(config, tuple(i >= dense for i in range(layers))),
    )


def sigmoid_router(
    config: dict[str, Any], sparse: tuple[bool, ...], scale: float = 1.0
) -> MoeSpec | None:
    """The router of both GLM families: sigmoid scores, a bias for the choice, shared experts.

    `scale` is the family's default for routed_scaling_factor.
    """
    if positive(config, "n_group", 1) != 1:
        raise UnsupportedModel("groups of experts (n_group above 1) are not supported")
    if not config.get("norm_topk_prob", True):
        raise UnsupportedModel("norm_topk_prob false is not supported for a sigmoid router")
    top_k = positive(config, "num_experts_per_tok")
    if top_k < 2:
        raise UnsupportedModel("num_experts_per_tok 1 is not supported for a sigmoid router")
    shared = config.get("n_shared_experts", 1)
    if type(shared) is not int or shared < 0:
        raise UnsupportedModel(f"field n_shared_experts must be a number, not {shared!r}")
    width = positive(config, "moe_intermediate_size")
    return checked(
        MoeSpec(
            num_experts=positive(config, "n_routed_experts"),
            top_k=top_k,
            ffn_size=width,
            sparse=sparse,
            sigmoid=True,
            bias=True,
            scale=number(config, "routed_scaling_factor", scale),
            shared_ffn_size=width * shared,
        )
    )
