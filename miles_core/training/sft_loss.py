"""The supervised loss."""

from __future__ import annotations

import torch

from miles_core.training.batch import Packed

SFT_NAMES = ("loss",)


def sft_loss(
    log_probs: torch.Tensor, packed: Packed
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """-sum(weight * log p) over the micro-batch's tokens."""
    loss = -(log_probs * packed.weights()).sum()
    return loss, {"loss": loss.detach()}
