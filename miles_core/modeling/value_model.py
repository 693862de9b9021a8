"""A model of the policy's family that gives a value where the policy gives logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from miles_core.modeling import parallel
from miles_core.modeling.gpt import PolicyModel
from miles_core.modeling.hf_config import ModelSpec
from miles_core.modeling.log_probs import Head
from miles_core.modeling.model_config import transformer_config

HEAD_NAME = "output_layer.weight"
HEAD_STD = 0.02


class ValueHead(torch.nn.Module):
    """The weight [1, h] that gives values from hidden states, where the policy has its logits'.

    It is drawn from N(0, 0.02^2) and whole on every tensor-parallel rank.
    """

    def __init__(self, hidden_size: int, seed: int) -> None:
        super().__init__()
        dice = torch.Generator().manual_seed(seed)
        self.weight = torch.nn.Parameter(HEAD_STD * torch.randn(1, hidden_size, generator=dice))

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """For dist_checkpointing: the same on all ranks that have it."""
        state: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True), prefix, {}, sharded_offsets
        )
        return state


class ValueModel(PolicyModel):
    """A GPTModel whose output layer is a value head, with embeddings of its own."""

    def __init__(self, spec: ModelSpec, config: TransformerConfig, seed: int) -> None:
        super().__init__(replace(spec, tied=False), config)
        if self.post_process:
            self.output_layer = ValueHead(config.hidden_size, seed)


def token_values(head: Head) -> torch.Tensor:
    """Values [N] of the rows that a ValueModel's head is over; in float32 whatever its dtype."""
    return F.linear(head.hidden.float(), head.weight.float()).squeeze(-1)


def build_value_model(
    spec: ModelSpec,
    tp_size: int,
    dtype: torch.dtype,
    sequence_parallel: bool = False,
    recompute: bool = False,
    seed: int = 0,
) -> ValueModel:
    """This rank's model on its device; `seed` alone decides the value head, in every layout."""
    config = transformer_config(spec, tp_size, dtype, sequence_parallel, recompute)
    model = ValueModel(spec, config, seed).to(device=parallel.device(), dtype=dtype)
    model.keep_router_biases()
    return model
