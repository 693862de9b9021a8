"""Micro-batches through the pipeline of ranks, on megatron's schedules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from miles_core.modeling import parallel
from miles_core.modeling.cut import Cut
from miles_core.modeling.gpt import PolicyModel
from miles_core.modeling.log_probs import Head
from miles_core.modeling.routing import RoutedPass


class MicroBatch(Protocol):
    """`tokens` [T] in segments of `lengths`; the logits at `rows` [N] predict `targets` [N]."""

    tokens: torch.Tensor
    lengths: list[int]
    rows: torch.Tensor
    targets: torch.Tensor


# From the head over this rank's n rows, the targets [n] they predict, the micro-batch's number and
# its cut to a scalar whose gradient is wanted.
Last = Callable[[Head, torch.Tensor, int, Cut], torch.Tensor]


def run(
    model: PolicyModel,
    batches: Sequence[MicroBatch],
    last: Last,
    *,
    packed: bool,
    backward: bool,
    routed: RoutedPass | None = None,
) -> None:
    """Every micro-batch forward, and backward from what `last` gives on the last pipeline stage.

    Ranks that work on the same samples must agree on the batches; with expert parallelism all
    data-parallel ranks must agree on their number. Gradients add up in the model. `routed` says
    which experts the tokens go to, where they do not choose themselves.
    """
    if not batches:
        return

    def step(numbers: Any, stage: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        number = next(numbers)
        batch = batches[number]
        cut = Cut(batch.tokens, batch.lengths, batch.rows, packed, model.config.sequence_parallel)

        def scalar(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
            value = last(model.head(hidden), batch.targets[cut.places], number, cut)
            return value, torch.zeros((), dtype=torch.int, device=hidden.device), {}

        part = stage.part(cut) if routed is None else routed.part(stage, cut, number)
        return part, scalar

    with routed or nullcontext():
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(range(len(batches))),
            model=[model],
            num_microbatches=len(batches),
            seq_length=1,  # shapes are sent along
            micro_batch_size=1,
            forward_only=not backward,
        )


def from_last_stage(values: torch.Tensor) -> torch.Tensor:
    """What the last pipeline stage holds, on all its stages; shapes agree. Collective."""
    group = parallel_state.get_pipeline_model_parallel_group()
    if group.size() > 1:
        values = values.to(parallel.device(), copy=True)
        dist.broadcast(values, parallel_state.get_pipeline_model_parallel_last_rank(), group)
    return values
