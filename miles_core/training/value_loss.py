"""The clipped loss of a critic over flat tensors of sampled tokens, in plain torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

VALUE_NAMES = ("loss", "value_clipfrac")
"""The sums of `value_loss`; the second is a mean when divided by the sum of all weights."""


@dataclass
class ValueData:
    """N sampled tokens, each field [N]: the targets, the values before the step, the weights."""

    returns: torch.Tensor
    old: torch.Tensor
    weights: torch.Tensor


def value_loss(
    values: torch.Tensor, data: ValueData, clip: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Weighted sum of `max((V - R)^2, (V_clip - R)^2)`, where V_clip is V held to +-`clip` around
    the value before the step, and sums for metrics (detached).

    The squared error is that of PPO (arXiv 1707.06347, equation 9, without a factor 1/2), the clip
    that of its authors' code. A token counts as clipped where the clipped error is the larger one.
    """
    held = data.old + (values - data.old).clamp(-clip, clip)
    plain, clipped = (values - data.returns).square(), (held - data.returns).square()
    loss = (torch.maximum(plain, clipped) * data.weights).sum()
    share = ((clipped > plain).float() * data.weights).sum()
    return loss, {"loss": loss.detach(), "value_clipfrac": share.detach()}
