"""GLM-4.7-Flash: multi-head latent attention, GLM's sigmoid router, dense first layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from miles_core.modeling.families.glm4_moe import sigmoid_router
from miles_core.modeling.hf_config import (
    MlaSpec,
    ModelSpec,
    UnsupportedModel,
    common_values,
    positive,
    refuse,
)
from miles_core.modeling.mapping import Along, Weight, Whole, dense_or_sparse_mlp, norms


def read(config: dict[str, Any]) -> ModelSpec:
    refuse(config, "attention_bias")
    if not config.get("rope_interleave", True):
        raise UnsupportedModel("rope_interleave false is not supported for glm4_moe_lite")
    if "q_lora_rank" not in config:
        raise UnsupportedModel("field q_lora_rank is missing; null means that there is none")
    layers = positive(config, "num_hidden_layers")
    kinds = config.get("mlp_layer_types") or ["dense"] + ["sparse"] * (layers - 1)
    if len(kinds) != layers or set(kinds) - {"dense", "sparse"}:
        raise UnsupportedModel(
            f"mlp_layer_types must say of each of {layers} layers whether it is dense or sparse"
        )
    mla = MlaSpec(
        q_rank=None if config["q_lora_rank"] is None else positive(config, "q_lora_rank"),
        kv_rank=positive(config, "kv_lora_rank"),
        plain_dim=positive(config, "qk_nope_head_dim"),
        rope_dim=positive(config, "qk_rope_head_dim"),
        value_dim=positive(config, "v_head_dim"),
    )
    values = common_values({**config, "head_dim": mla.rope_dim}, norm_eps=1e-5)
    if values["num_kv_heads"] != values["num_heads"]:
        raise UnsupportedModel("num_key_value_heads must be num_attention_heads here")
    if values["rope_scaling"] is not None:
        raise UnsupportedModel("a rope_type other than default is not supported for glm4_moe_lite")
    values["head_dim"] = mla.plain_dim + mla.rope_dim
    moe = sigmoid_router(config, tuple(kind == "sparse" for kind in kinds), scale=1.8)
    return ModelSpec(**values, qk_norm=True, moe=moe, mla=mla)


def layer(spec: ModelSpec, number: int) -> Iterator[Weight]:
    yield from norms(number)
    yield from _latent_attention(spec, number)
    yield from dense_or_sparse_mlp(spec, number)


def _latent_attention(spec: ModelSpec, number: int) -> Iterator[Weight]:
    assert spec.mla is not None
    ours, theirs = f"decoder.layers.{number}.self_attention.", f"model.layers.{number}.self_attn."
    names = [
        ("linear_kv_down_proj", "kv_a_proj_with_mqa", 0),
        ("kv_layernorm", "kv_a_layernorm", None),
        ("linear_kv_up_proj", "kv_b_proj", 0),
        ("linear_proj", "o_proj", 1),
    ]
    if spec.mla.q_rank is None:
        names.append(("linear_q_proj", "q_proj", 0))
    else:
        names.append(("linear_q_down_proj", "q_a_proj", 0))
        names.append(("q_layernorm", "q_a_layernorm", None))
        names.append(("linear_q_up_proj", "q_b_proj", 0))
    for own, name, dim in names:
        cut = Whole() if dim is None else Along(dim)
        yield Weight(f"{ours}{own}.weight", (f"{theirs}{name}.weight",), cut)
