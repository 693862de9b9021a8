"""Causal core attention on torch's scaled dot product, for padded and for packed batches."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig


class SDPAttention(MegatronModule):
    """Grouped-query causal attention.

    Shapes (s tokens, b rows, n query heads, g key-value heads, d head size): query [s, b, n, d],
    key and value [s, b, g, d] give [s, b, n*d]. Packed ("thd") input has no b: segments lie one
    behind the other, bounded by `cu_seqlens_q`, and never see each other.
    """

    def __init__(
        self, config: TransformerConfig, *, softmax_scale: float | None = None, **_: Any
    ) -> None:
        super().__init__(config=config)
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        if packed_seq_params is None:
            return self._attend(query, key, value)
        bounds = packed_seq_params.cu_seqlens_q
        assert bounds is not None, "packed input needs cu_seqlens_q"
        sizes = bounds.diff().tolist()
        segments = [
            self._attend(q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)).squeeze(1)
            for q, k, v in zip(
                query.split(sizes), key.split(sizes), value.split(sizes), strict=True
            )
        ]
        return torch.cat(segments)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self.softmax_scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out.permute(2, 0, 1, 3).flatten(2)
