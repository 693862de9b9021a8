"""GPTModel of this rank from a ModelSpec, and its forward pass over packed segments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from miles_core.modeling import parallel
from miles_core.modeling.hf_config import ModelSpec
from miles_core.modeling.megatron_fixes import complete_latent
from miles_core.modeling.model_config import layer_spec, transformer_config
from miles_core.modeling.norm import RMSNorm


class PolicyModel(GPTModel):
    """A GPTModel that can leave out the logits of tokens nobody asks for.

    `first_layer` and `first_expert`: the number in the whole model of this rank's first one.
    """

    def __init__(self, spec: ModelSpec, config: TransformerConfig) -> None:
        self.first_layer = get_transformer_layer_offset(config)
        numbers = range(self.first_layer, self.first_layer + get_num_layers_to_build(config))
        super().__init__(
            config,
            TransformerBlockSubmodules(
                layer_specs=[layer_spec(spec, number) for number in numbers], layer_norm=RMSNorm
            ),
            spec.vocab_size,
            spec.max_positions,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            position_embedding_type="rope",
            rotary_base=spec.rope_theta,
            rotary_percent=spec.rope_share,
            share_embeddings_and_output_weights=spec.tied,
            parallel_output=True,
        )
        experts = spec.moe.num_experts if spec.moe else 0
        ranks = parallel_state.get_expert_model_parallel_world_size()
        self.first_expert = parallel_state.get_expert_model_parallel_rank() * (experts // ranks)
        if spec.mla is not None:
            for layer in self.decoder.layers:
                complete_latent(layer.self_attention)
        self._rows: torch.Tensor | None = None
        if self.post_process:
            self.output_layer.register_forward_pre_hook(self._select_rows)

    def _select_rows(self, _: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if self._rows is None:
            return args
        return (args[0].index_select(0, self._rows), *args[1:])

    def stored_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and values of what a checkpoint holds: parameters and the routers' biases."""
        yield from self.named_parameters()
        for name, buffer in self.named_buffers():
            if name.endswith(".expert_bias"):
                yield name, buffer

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
