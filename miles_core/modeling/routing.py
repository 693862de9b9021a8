"""A pass whose tokens go to given experts instead of those that the routers would choose.

The weights of the experts come from the router's present scores at the given places, normalised
and scaled as the family does it, so that gradients reach the router as always.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from miles_core.modeling.cut import Cut
from miles_core.modeling.gpt import PolicyModel

Chosen = tuple[torch.Tensor, torch.Tensor]


def sparse_layers(model: PolicyModel) -> list[int]:
    """Numbers in the whole model, from 0, of this rank's layers with experts."""
    layers = enumerate(model.decoder.layers, start=model.first_layer)
    return [number for number, layer in layers if hasattr(layer.mlp, "router")]


class RoutedPass:
    """A pass over micro-batches; a context manager that the model's routers obey.

    `given` has for each micro-batch of T tokens the experts [T, layers, k] int16 of this rank's
    sparse layers, -1 where a token chooses itself, or None when all do. With `record` the experts
    that were taken are kept in `taken`, in the same form; a rank without sparse layers has none.
    `backward`: a backward pass follows; layers that it recomputes take the same experts again.

    After the pass `replayed` is how many choices of an expert were given to this rank's tokens,
    padding left out, and `differing` how many of those the router would not have made.
    """

    def __init__(
        self,
        model: PolicyModel,
        given: Sequence[torch.Tensor | None],
        *,
        backward: bool,
        record: bool = False,
    ) -> None:
        self._routers = [
            layer.mlp.router for layer in model.decoder.layers if hasattr(layer.mlp, "router")
        ]
        self._given = given
        self._backward = backward
        self._record = record
        self._forward_runs = False
        self._experts: torch.Tensor | None = None
        self._own_taken: list[torch.Tensor] = []
        self._to_recompute: list[deque[torch.Tensor | None]] = [deque() for _ in self._routers]
        self.taken: list[torch.Tensor] = []
        self.replayed = 0
        self.differing = 0

    def __enter__(self) -> RoutedPass:
        for place, router in enumerate(self._routers):
            router.router_replay = _Choice(self, place)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        for router in self._routers:
            router.router_replay = None
        if kind is None and any(self._to_recompute):
            raise RuntimeError("layers were not recomputed as often as they were computed")

    def part(self, model: PolicyModel, cut: Cut, number: int) -> torch.Tensor:
        """`model.part(cut)` with the experts of micro-batch `number`."""
        given = self._given[number]
        self._experts = None if given is None else cut.states(given, -1)
        self._own_taken = []
        self._forward_runs = True
        try:
            out = model.part(cut)
        finally:
            self._forward_runs = False
        if self._record and self._routers:
            self.taken.append(cut.whole_states(torch.stack(self._own_taken, 1).short(), -1))
        return out

    def choose(self, place: int, scores: torch.Tensor, own: Callable[[], Chosen]) -> Chosen:
        """Scores and numbers [n, k] of the experts that layer `place` takes, by scores [n, E]."""
        if not self._forward_runs:
            return _replace(scores, own(), self._to_recompute[place].popleft())
        experts = None if self._experts is None else self._experts[:, place]
        if self._backward and not torch.is_grad_enabled():
            self._to_recompute[place].append(experts)
        chosen = own()
        if experts is not None:
            self._count(chosen[1], experts)
        chosen = _replace(scores, chosen, experts)
        if self._record:
            self._own_taken.append(chosen[1].detach())
        return chosen

    def _count(self, own: torch.Tensor, experts: torch.Tensor) -> None:
        known = experts[:, 0] >= 0
        same = (experts[known, :, None] == own[known, None, :]).any(-1)
        self.replayed += same.numel()
        self.differing += same.numel() - int(same.sum())


def _replace(scores: torch.Tensor, chosen: Chosen, experts: torch.Tensor | None) -> Chosen:
    """What was chosen, with `experts` [n, k] where they are not -1."""
    if experts is None:
        return chosen
    numbers = torch.where(experts[:, :1] >= 0, experts.long(), chosen[1])
    return scores.gather(1, numbers), numbers


class _Choice:
    """What megatron's router asks when it has scores."""

    def __init__(self, routed: RoutedPass, place: int) -> None:
        self._routed, self._place = routed, place

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        compute: Callable[..., Chosen],
    ) -> Chosen:
        def own() -> Chosen:
            return compute(scores, topk, num_groups=num_groups, group_topk=group_topk)

        return self._routed.choose(self._place, scores, own)
