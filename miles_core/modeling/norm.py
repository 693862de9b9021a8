"""RMS normalisation without Transformer Engine."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig


class _RMSNorm(torch.autograd.Function):
    """`x r w` with r = 1 / sqrt(mean(x^2) + eps); x and r are kept, torch on a CPU keeps x r too.

    With g the gradient and h = x r: dw = sum over rows of g h, dx = r (g w - h mean(g w h)).
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.float()
        square = wide.square()
        # not `vector_norm`, whose plain sums lose what lies beside a massive value
        scale = square.mean(dim=-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, scale, weight)
        return torch.mul(wide, scale, out=square).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, scale, weight = ctx.saved_tensors
        grad, normal = grads[0].float(), x.float() * scale
        product = grad * normal
        of_weight = product.flatten(0, -2).sum(0).to(weight.dtype)
        mean = product.mul_(weight).mean(dim=-1, keepdim=True)
        of_x = torch.mul(grad, weight, out=product).sub_(normal.mul_(mean)).mul_(scale)
        return of_x.to(x.dtype), of_weight, None


class RMSNorm(torch.nn.Module):
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension, in the input's dtype."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # megatron reads this mark when it reduces gradients of replicated weights
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.device.type == "cpu":
            out: torch.Tensor = _RMSNorm.apply(x, self.weight, self.eps)
            return out
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)  # one kernel


class LatentNorm(RMSNorm):
    """The norm of a latent in multi-head latent attention: eps is 1e-6 whatever the model's is."""

    def __init__(self, config: TransformerConfig, hidden_size: int, **_: Any) -> None:
        super().__init__(config, hidden_size, 1e-6)
