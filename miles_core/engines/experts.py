"""The mixture of experts of a layer (Qwen3 MoE): softmax router, the best experts of each token."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from miles_core.engines.shape import ExpertShape
from miles_core.engines.weights import Layer


def mix_experts(
    x: torch.Tensor, layer: Layer, shape: ExpertShape
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the experts make of x [tokens, hidden], and the numbers of each token's [tokens, k].

    Scores are a softmax over all experts in float32; with `normalize` the chosen ones sum to 1.
    """
    assert layer.router is not None and layer.expert_gate_up is not None
    assert layer.expert_down is not None
    scores = torch.softmax(x.float() @ layer.router.float(), -1)
    weights, chosen = scores.topk(shape.chosen, -1)
    if shape.normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    out = torch.zeros_like(x)
    for expert in chosen.unique().tolist():
        rows, places = (chosen == expert).nonzero(as_tuple=True)
        gate, up = (x[rows] @ layer.expert_gate_up[expert]).chunk(2, -1)
        made = F.silu(gate).mul_(up) @ layer.expert_down[expert]
        out.index_add_(0, rows, made * weights[rows, places, None].to(x.dtype))
    return out, chosen
