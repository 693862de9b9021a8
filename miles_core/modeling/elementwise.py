"""SwiGLU and rotary positions in few passes over memory, keeping little for backward.

They stand in megatron's places without Transformer Engine: see `install`. A product of matrices
apart, a step on a CPU costs what it reads and writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.transformer import mlp
from megatron.core.transformer.moe import experts, shared_experts


class _SwiGLU(torch.autograd.Function):
    """silu(a) b of x = [a, b]; only x is kept."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        out = torch.empty_like(x)
        of_gate, of_up = out.chunk(2, dim=-1)
        torch.mul(grads[0], F.silu(gate), out=of_up)
        torch.ops.aten.silu_backward.grad_input(grads[0] * up, gate, grad_input=of_gate)
        return out


def swiglu(x: torch.Tensor, bias: None = None, *_: Any) -> torch.Tensor:
    """silu(a) b of x = [a, b], [..., 2 f] to [..., f] (arXiv 2002.05202)."""
    if bias is not None:
        raise ValueError("a bias before SwiGLU is not supported")
    out: torch.Tensor = _SwiGLU.apply(x)
    return out


def weighted_swiglu(x: torch.Tensor, bias: None, weights: torch.Tensor, *_: Any) -> torch.Tensor:
    """The same, times `weights` [..., 1] of a token's experts, in the dtype of x."""
    return (swiglu(x, bias) * weights).to(x.dtype)


class _Rotation(torch.autograd.Function):
    """(a cos - b sin, b cos + a sin) of the pairs (a, b) in the first dimensions of t.

    t [s, ..., d], cos and sin [s, ..., r / 2]. A pair is (i, i + r / 2), or, `interleaved`,
    (2 i, 2 i + 1); in the output always the first.
    """

    @staticmethod
    def forward(
        ctx: Any, t: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        out = torch.empty_like(t, memory_format=torch.contiguous_format)
        size = 2 * cos.shape[-1]
        out[..., size:] = t[..., size:]
        _rotate(_pairs(t, size, interleaved), cos, sin, _pairs(out, size, False))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        out = torch.empty_like(grads[0], memory_format=torch.contiguous_format)
        size = 2 * cos.shape[-1]
        out[..., size:] = grads[0][..., size:]
        _rotate(_pairs(grads[0], size, False), cos, -sin, _pairs(out, size, ctx.interleaved))
        return out, None, None, None


def _pairs(t: torch.Tensor, size: int, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    if interleaved:
        return t[..., 0:size:2], t[..., 1:size:2]
    return t[..., : size // 2], t[..., size // 2 : size]


def _rotate(
    pairs: tuple[torch.Tensor, torch.Tensor],
    cos: torch.Tensor,
    sin: torch.Tensor,
    out: tuple[torch.Tensor, torch.Tensor],
) -> None:
    (a, b), (first, second) = pairs, out
    torch.mul(a, cos, out=first)
    first.addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=second)
    second.addcmul_(a, sin)


@dataclass
class _Turns:
    """Cosines and sines of a micro-batch's tokens, which all layers share."""

    freqs: torch.Tensor
    bounds: torch.Tensor | None
    scale: float
    dtype: torch.dtype
    cos: torch.Tensor
    sin: torch.Tensor

    def answers(self, freqs: torch.Tensor, bounds: torch.Tensor | None, *rest: Any) -> bool:
        """Whether these are of the same frequencies and segments."""
        same = self.freqs is freqs and self.bounds is bounds
        return same and (self.scale, self.dtype) == rest


_last: _Turns | None = None


def _turns(
    t: torch.Tensor,
    freqs: torch.Tensor,
    bounds: torch.Tensor | None,
    scale: float,
    group: Any = None,
) -> _Turns:
    global _last
    last = _last
    if last is None or not last.answers(freqs, bounds, scale, t.dtype):
        angles = freqs[..., : freqs.shape[-1] // 2]
        if bounds is not None:
            sizes = (bounds.diff() // group.size()).tolist()
            parts = [
                rope_utils._get_thd_freqs_on_this_cp_rank(group.rank(), group.size(), part, angles)
                for part in t.split(sizes)
            ]
            angles = torch.cat(parts).squeeze(1)
        cos, sin = ((f(angles) * scale).to(t.dtype) for f in (torch.cos, torch.sin))
        _last = last = _Turns(freqs, bounds, scale, t.dtype, cos, sin)
    return last


def rotate_rows(
    t: torch.Tensor,
    freqs: torch.Tensor,
    rotary_interleaved: bool = False,
    multi_latent_attention: bool = False,
    mscale: float = 1.0,
) -> torch.Tensor:
    """Rotary positions (arXiv 2104.09864) of t [s, b, heads, d], `freqs` [s, 1, 1, r].

    Latent attention stores pairs side by side and wants them apart. Named as megatron calls it.
    """
    if rotary_interleaved:
        raise ValueError("interleaved rotary positions are not supported")
    turns = _turns(t, freqs, None, mscale)
    out: torch.Tensor = _Rotation.apply(t, turns.cos, turns.sin, multi_latent_attention)
    return out


def rotate_segments(
    t: torch.Tensor,
    cu_seqlens: torch.Tensor,
    freqs: torch.Tensor,
    rotary_interleaved: bool = False,
    multi_latent_attention: bool = False,
    mscale: float = 1.0,
    cp_group: Any = None,
) -> torch.Tensor:
    """The same for segments one behind the other, t [s, heads, d], each from position 0 on.

    With context parallelism t holds this rank's two chunks of each segment.
    """
    if rotary_interleaved:
        raise ValueError("interleaved rotary positions are not supported")
    turns = _turns(t, freqs, cu_seqlens, mscale, cp_group)
    out: torch.Tensor = _Rotation.apply(t, turns.cos, turns.sin, multi_latent_attention)
    return out


def install() -> None:
    """Put these in the places of megatron's, for models whose `bias_activation_fusion` is set."""
    mlp.bias_swiglu_impl = shared_experts.bias_swiglu_impl = swiglu
    mlp.weighted_bias_swiglu_impl = experts.weighted_bias_swiglu_impl = weighted_swiglu
    rope_utils._apply_rotary_pos_emb_bshd = rotate_rows
    rope_utils._apply_rotary_pos_emb_thd = rotate_segments
