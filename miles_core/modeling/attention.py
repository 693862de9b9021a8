"""Causal core attention on torch's scaled dot product, for padded and for packed batches."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from miles_core.modeling import parallel
from miles_core.modeling.cut import Segments


class _Gather(torch.autograd.Function):
    """[s, ...] of each rank to [ranks, s, ...]; backward sums the gradients of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        parts = [
            torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())
        ]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = grads[0].contiguous()
        dist.all_reduce(total, group=ctx.group)
        return total[ctx.group.rank()], None


def _in_order(parts: torch.Tensor) -> torch.Tensor:
    """A whole segment [s, ...] from the two chunks of each rank, [ranks, s / ranks, ...]."""
    first, second = parts.chunk(2, dim=1)
    return torch.cat([*first, *second.flip(0)])


class SDPAttention(MegatronModule):
    """Grouped-query causal attention.

    Shapes (s tokens, b rows, n query heads, g key-value heads, d head size): query [s, b, n, d],
    key and value [s, b, g, d] give [s, b, n*d]. Packed ("thd") input has no b: segments lie one
    behind the other, bounded by `cu_seqlens_q`, and never see each other. With context parallelism
    s is this rank's two chunks of each segment (see `cut.Cut`) and keys and values are gathered.
    """

    def __init__(
        self, config: TransformerConfig, *, softmax_scale: float | None = None, **_: Any
    ) -> None:
        super().__init__(config=config)
        self.softmax_scale = softmax_scale
        self._group = parallel.cp_group()

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Segments | None = None,
    ) -> torch.Tensor:
        sizes = [len(query)]
        if packed_seq_params is not None:
            sizes = packed_seq_params.own_sizes
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        attend = self._whole_segments if self._group.size() == 1 else self._chunks
        out = attend(query, key, value, sizes)
        return out if packed_seq_params is None else out.squeeze(1)

    def _whole_segments(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sizes: list[int]
    ) -> torch.Tensor:
        if len(sizes) == 1:
            return self._attend(q, k, v)
        parts = zip(q.split(sizes), k.split(sizes), v.split(sizes), strict=True)
        return torch.cat([self._attend(*part) for part in parts])

    def _chunks(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sizes: list[int]
    ) -> torch.Tensor:
        ranks, rank = self._group.size(), self._group.rank()
        keys = _Gather.apply(k, self._group).split(sizes, dim=1)
        values = _Gather.apply(v, self._group).split(sizes, dim=1)
        out = []
        for queries, *parts in zip(q.split(sizes), keys, values, strict=True):
            whole_k, whole_v = (_in_order(part) for part in parts)
            for number, chunk in zip((rank, 2 * ranks - 1 - rank), queries.chunk(2), strict=True):
                end = (number + 1) * len(chunk)
                out.append(self._attend(chunk, whole_k[:end], whole_v[:end]))
        return torch.cat(out)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """The queries are the last ones of the keys' positions."""
        before = len(k) - len(q)
        mask = None
        if before:
            # the kernels that take a mask and never hold all scores want as many keys as queries
            k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
            mask = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).tril(before)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.softmax_scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return out.permute(2, 0, 1, 3).flatten(2)
