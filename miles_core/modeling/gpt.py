"""GPTModel of this rank from a ModelSpec, and its forward pass over packed segments."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from miles_core.modeling import parallel
from miles_core.modeling.cut import Cut
from miles_core.modeling.hf_config import ModelSpec
from miles_core.modeling.log_probs import Head
from miles_core.modeling.lora import ADAPTER, Lora
from miles_core.modeling.megatron_fixes import complete_latent, mark_cut
from miles_core.modeling.model_config import layer_spec, transformer_config
from miles_core.modeling.norm import RMSNorm

_PLACE = re.compile(r"(decoder\.layers|local_experts)\.(\d+)\.")


class PolicyModel(GPTModel):
    """A GPTModel that gives hidden states, and logits of those alone that are asked for.

    `first_layer` and `first_expert`: the number in the whole model of this rank's first one.
    `lora`: its adapters, once `lora.attach` gave it some; all else is frozen then.
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
        if spec.rope_scaling is not None:
            frequencies = spec.rope_scaling.frequencies(
                spec.rope_theta, int(spec.head_dim * spec.rope_share)
            )
            self.rotary_pos_emb.inv_freq = frequencies.to(self.rotary_pos_emb.inv_freq.device)
        mark_cut(self)
        experts = spec.moe.num_experts if spec.moe else 0
        ranks = parallel_state.get_expert_model_parallel_world_size()
        self.first_expert = parallel_state.get_expert_model_parallel_rank() * (experts // ranks)
        if spec.mla is not None and config.sequence_parallel:
            for layer in self.decoder.layers:
                complete_latent(layer.self_attention)
        self._rows: torch.Tensor | None = None
        self.lora: Lora | None = None

    def _postprocess(self, hidden_states: torch.Tensor, **rest: Any) -> torch.Tensor:
        """For `part` in place of megatron's, which computes the logits of all tokens at once."""
        if self._rows is None or not self.post_process:
            return super()._postprocess(hidden_states, **rest)
        if self.config.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False
            )
        return hidden_states.flatten(0, 1).index_select(0, self._rows)

    def head(self, hidden: torch.Tensor) -> Head:
        """Logits of what `part` gave on the last pipeline stage."""
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        return Head(hidden, weight)

    def global_name(self, name: str) -> str:
        """The name in the whole model of what this rank calls `name`."""
        first = {"decoder.layers": self.first_layer, "local_experts": self.first_expert}
        return _PLACE.sub(lambda m: f"{m[1]}.{int(m[2]) + first[m[1]]}.", name)

    def stored_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and values of the model: parameters and the routers' biases, without adapters."""
        for name, parameter in self.named_parameters():
            if ADAPTER not in name:
                yield name, parameter
        for name, buffer in self.named_buffers():
            if name.endswith(".expert_bias"):
                yield name, buffer

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """megatron's, of the model without its adapters."""
        state = super().sharded_state_dict(*args, **kwargs)
        return {name: value for name, value in state.items() if ADAPTER not in name}

    def keep_router_biases(self) -> None:
        """Routers' biases stay float32 whatever the model was cast to."""
        for name, buffer in self.named_buffers():
            if name.endswith(".expert_bias"):
                buffer.data = buffer.data.float()

    def part(self, cut: Cut) -> torch.Tensor:
        """This rank's pass: hidden states [n, h] at `cut.rows` on the last pipeline stage, all of
        them for the next stage before it."""
        self._rows = cut.rows
        try:
            # rotary positions follow from the packing or from the row, never from this argument
            positions = torch.zeros_like(cut.tokens)
            return self(cut.tokens, positions, None, packed_seq_params=cut.packing)
        finally:
            self._rows = None

    def packed_logits(
        self, tokens: torch.Tensor, lengths: list[int], rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Logits [N, vocab / tp] of the tokens at `rows` (default: all T).

        `tokens` [T] int64 holds segments of `lengths` (positive, summing to T) one behind the
        other; each segment starts at position 0 and sees only itself. Needs the whole model and
        whole sequences: neither pipeline nor context parallelism.
        """
        if rows is None:
            rows = torch.arange(len(tokens), device=tokens.device)
        cut = Cut(tokens, lengths, rows, True, self.config.sequence_parallel)
        return self.head(self.part(cut)).logits()


def build_model(
    spec: ModelSpec,
    tp_size: int,
    dtype: torch.dtype,
    sequence_parallel: bool = False,
    recompute: bool = False,
) -> PolicyModel:
    """This rank's model on its device; its weights are any values until they are loaded."""
    config = transformer_config(spec, tp_size, dtype, sequence_parallel, recompute)
    model = PolicyModel(spec, config).to(device=parallel.device(), dtype=dtype)
    model.keep_router_biases()
    return model
