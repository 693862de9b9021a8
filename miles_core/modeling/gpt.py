"""GPTModel of this rank from a ModelSpec, and its forward pass over packed segments."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from miles_core.modeling import parallel
from miles_core.modeling.attention import SDPAttention
from miles_core.modeling.hf_config import ModelSpec, UnsupportedModel
from miles_core.modeling.norm import RMSNorm


def transformer_config(spec: ModelSpec, tp_size: int, dtype: torch.dtype) -> TransformerConfig:
    """megatron's configuration; every fused kernel that needs CUDA extensions is off."""
    for name, size in (("vocab_size", spec.vocab_size), ("key-value heads", spec.num_kv_heads)):
        if size % tp_size:
            raise UnsupportedModel(f"{name} {size} is not a multiple of tensor parallel {tp_size}")
    return TransformerConfig(
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
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tp_size,
        use_cpu_initialization=True,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # losses carry their own global denominators: gradients are summed over ranks
        calculate_per_token_loss=True,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )


def _replace_norms(submodules: Any) -> None:
    for name, value in list(vars(submodules).items()):
        if inspect.isclass(value) and issubclass(value, WrappedTorchNorm):
            setattr(submodules, name, RMSNorm)
        elif getattr(value, "submodules", None) is not None:
            _replace_norms(value.submodules)


def _layer_spec(spec: ModelSpec) -> ModuleSpec:
    layer = get_gpt_layer_local_spec(qk_layernorm=spec.qk_norm, normalization="RMSNorm")
    layer.submodules.self_attention.submodules.core_attention = SDPAttention
    _replace_norms(layer.submodules)
    return layer


class PolicyModel(GPTModel):
    """A GPTModel that can leave out the logits of tokens nobody asks for."""

    def __init__(self, spec: ModelSpec, config: TransformerConfig) -> None:
        layers = [_layer_spec(spec)] * spec.num_layers
        super().__init__(
            config,
            TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm),
            spec.vocab_size,
            spec.max_positions,
            position_embedding_type="rope",
            rotary_base=spec.rope_theta,
            share_embeddings_and_output_weights=spec.tied,
            parallel_output=True,
        )
        self._rows: torch.Tensor | None = None
        self.output_layer.register_forward_pre_hook(self._select_rows)

    def _select_rows(self, _: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if self._rows is None:
            return args
        return (args[0].index_select(0, self._rows), *args[1:])

    def packed_logits(
        self, tokens: torch.Tensor, lengths: list[int], rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Logits [N, vocab / tp] of the tokens at `rows` (default: all T).

        `tokens` [T] int64 holds segments of `lengths` (positive, summing to T) one behind the
        other; each segment starts at position 0 and sees only itself.
        """
        bounds = torch.tensor([0, *lengths]).cumsum(0).to(tokens.device, torch.int32)
        packing = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
        )
        positions = torch.cat([torch.arange(n, device=tokens.device) for n in lengths])
        self._rows = rows
        try:
            logits = self(tokens[None], positions[None], None, packed_seq_params=packing)
        finally:
            self._rows = None
        return logits.squeeze(0)


def build_model(spec: ModelSpec, tp_size: int, dtype: torch.dtype) -> PolicyModel:
    """This rank's model on its device, randomly initialised."""
    model = PolicyModel(spec, transformer_config(spec, tp_size, dtype))
    return model.to(device=parallel.device(), dtype=dtype)
