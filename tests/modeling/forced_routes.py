"""Transformers' models with experts, made to send tokens to given experts."""

from __future__ import annotations

from typing import Any

import torch


def routers(model: Any) -> list[Any]:
    """The routers, by layer."""
    return [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]


def record(model: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [T, V] of tokens [T], and the experts [T, layers, k] that transformers chose."""
    chosen: list[torch.Tensor] = []
    hooks = [
        router.register_forward_hook(lambda _, __, out: chosen.append(out[2]))
        for router in routers(model)
    ]
    logits = model(tokens[None]).logits[0]
    for hook in hooks:
        hook.remove()
    return logits, torch.stack(chosen, 1)


def forced(model: Any, tokens: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """Logits [T, V] when token t goes to the experts [t, layer] (-1: its own), weighed by the
    router's scores of these, as each family publishes it."""

    def replace(place: int) -> Any:
        def hook(router: Any, _: Any, out: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            numbers = torch.where(experts[:, place] >= 0, experts[:, place].long(), out[2])
            return out[0], _weights(router, out[0].float(), numbers), numbers

        return hook

    hooks = [r.register_forward_hook(replace(place)) for place, r in enumerate(routers(model))]
    logits = model(tokens[None]).logits[0]
    for hook in hooks:
        hook.remove()
    return logits


def _weights(router: Any, logits: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    if hasattr(router, "e_score_correction_bias"):  # GLM
        scores = torch.sigmoid(logits).gather(1, numbers)
        return scores / scores.sum(-1, keepdim=True) * router.routed_scaling_factor
    scores = torch.softmax(logits, -1).gather(1, numbers)
    return scores / scores.sum(-1, keepdim=True) if router.norm_topk_prob else scores


def others(experts: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
    """Random different experts of `count` for a third of the tokens, and none for the last one."""
    changed = experts.clone()
    for token in range(len(experts)):
        for layer in range(experts.shape[1]):
            if torch.rand(1, generator=generator) < 0.33:
                order = torch.randperm(count, generator=generator)
                changed[token, layer] = order[: experts.shape[2]]
    changed[-1] = -1
    return changed
