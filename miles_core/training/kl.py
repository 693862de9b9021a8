"""Estimates of KL divergences from sampled tokens, and exponentials that do not overflow."""

from __future__ import annotations

from typing import Literal

import torch

KLType = Literal["k1", "k2", "k3", "low_var_kl"]
MAX_LOG_RATIO = 20.0
MAX_LOW_VAR_KL = 10.0


def bounded_exp(x: torch.Tensor) -> torch.Tensor:
    """exp(x) with x held to +-20. What is not finite becomes NaN, so that the bounds hide nothing:
    `x - x` is 0 for every finite x."""
    return x.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp() + (x - x)


def kl_estimate(log_probs: torch.Tensor, ref: torch.Tensor, kind: KLType) -> torch.Tensor:
    """Per-token estimate of KL(policy || reference) with x = log_probs - ref.

    k1: x; k2: x^2 / 2; k3: exp(-x) - 1 + x (http://joschu.net/blog/kl-approx.html); low_var_kl:
    k3 with x held to +-20 and the result to at most 10.
    """
    x = log_probs - ref
    if kind == "k1":
        return x
    if kind == "k2":
        return x * x / 2
    if kind == "k3":
        return torch.exp(-x) - 1 + x
    held = (-x).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (held.exp() - 1 - held).clamp(max=MAX_LOW_VAR_KL) + (x - x)
