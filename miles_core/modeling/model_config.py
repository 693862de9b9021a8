"""megatron's configuration and layers for a ModelSpec."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from miles_core.modeling import elementwise
from miles_core.modeling.attention import SDPAttention
from miles_core.modeling.hf_config import MlaSpec, ModelSpec, MoeSpec, UnsupportedModel
from miles_core.modeling.norm import LatentNorm, RMSNorm

elementwise.install()


def transformer_config(
    spec: ModelSpec,
    tp_size: int,
    dtype: torch.dtype,
    sequence_parallel: bool = False,
    recompute: bool = False,
) -> TransformerConfig:
    """megatron's configuration in the current groups; kernels that need extensions are off.

    `recompute`: only the input of each layer is kept for the backward pass.
    """
    for name, size in (("vocab_size", spec.vocab_size), ("key-value heads", spec.num_kv_heads)):
        if size % tp_size:
            raise UnsupportedModel(f"{name} {size} is not a multiple of tensor parallel {tp_size}")
    values: dict[str, Any] = {}
    if spec.moe is not None:
        values |= _moe_values(spec.moe)
    if spec.mla is not None:
        values |= _mla_values(spec.mla, spec.rope_theta)
    if recompute:
        values |= {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    if spec.rope_scaling is not None:
        # queries and keys are rotated whole, so the scale of cosine and sine enters both
        scale = spec.rope_scaling.cosine_scale**2
        values["softmax_scale"] = scale * spec.head_dim**-0.5
    kind = TransformerConfig if spec.mla is None else MLATransformerConfig
    return kind(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        ffn_hidden_size=spec.ffn_size,
        num_attention_heads=spec.num_heads,
        num_query_groups=spec.num_kv_heads,
        kv_channels=spec.head_dim,
        qk_layernorm=spec.qk_norm,
        layernorm_epsilon=spec.norm_eps,
        normalization="RMSNorm",
        activation_func=F.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=spec.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tp_size,
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        context_parallel_size=parallel_state.get_context_parallel_world_size(),
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
        expert_tensor_parallel_size=parallel_state.get_expert_tensor_parallel_world_size(),
        sequence_parallel=sequence_parallel,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # the default refuses variable lengths
        use_cpu_initialization=True,
        perform_initialization=False,  # a checkpoint fills every weight, or loading fails
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # losses carry their own global denominators: gradients are summed over ranks
        calculate_per_token_loss=True,
        bias_activation_fusion=True,  # with the function of `elementwise`
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        **values,
    )


def _moe_values(moe: MoeSpec) -> dict[str, Any]:
    return {
        "num_moe_experts": moe.num_experts,
        "moe_router_topk": moe.top_k,
        "moe_ffn_hidden_size": moe.ffn_size,
        "moe_layer_freq": [int(sparse) for sparse in moe.sparse],
        "moe_router_score_function": "sigmoid" if moe.sigmoid else "softmax",
        # softmax over all experts without normalising afterwards, or over the chosen ones
        "moe_router_pre_softmax": not moe.sigmoid and not moe.normalize,
        "moe_router_topk_scaling_factor": moe.scale if moe.scale != 1.0 else None,
        "moe_router_enable_expert_bias": moe.bias,
        # the bias balanced the load in pre-training; here it stays what the checkpoint says
        "moe_router_bias_update_rate": 0.0,
        "moe_shared_expert_intermediate_size": moe.shared_ffn_size or None,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": False,
        "moe_permute_fusion": False,
        "moe_router_dtype": "fp32",
    }


def _mla_values(mla: MlaSpec, rope_theta: float) -> dict[str, Any]:
    return {
        "multi_latent_attention": True,
        "q_lora_rank": mla.q_rank,
        "kv_lora_rank": mla.kv_rank,
        "qk_head_dim": mla.plain_dim,
        "qk_pos_emb_head_dim": mla.rope_dim,
        "v_head_dim": mla.value_dim,
        "rope_type": "rope",
        "rotary_base": rope_theta,
        "rotary_percent": 1.0,
    }


def _replace_norms(submodules: Any) -> None:
    for name, value in list(vars(submodules).items()):
        if inspect.isclass(value) and issubclass(value, WrappedTorchNorm):
            setattr(submodules, name, RMSNorm)
        elif getattr(value, "submodules", None) is not None:
            _replace_norms(value.submodules)


def layer_spec(spec: ModelSpec, layer: int) -> ModuleSpec:
    """The modules of a layer, counted from 0 over the whole model."""
    module = get_gpt_layer_local_spec(
        num_experts=spec.moe.num_experts if spec.moe and spec.sparse(layer) else None,
        qk_layernorm=spec.qk_norm,
        multi_latent_attention=spec.mla is not None,
        normalization="RMSNorm",
    )
    attention = module.submodules.self_attention.submodules
    attention.core_attention = SDPAttention
    _replace_norms(module.submodules)
    if spec.mla is not None:
        attention.q_layernorm = attention.kv_layernorm = LatentNorm
    return module
