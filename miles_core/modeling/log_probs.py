"""Log-probabilities and entropies of given tokens, from hidden states and the output weight.

Logits of all tokens over the whole vocabulary would be the largest tensor of a step by far. They
are computed for a block of rows at a time, in forward and again in backward; where they are small
the softmax is kept instead. The vocabulary may be split over tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region

from miles_core.modeling import parallel

BLOCK = {"cpu": 2**21, "cuda": 2**27}
"""Logits that exist at once: on a CPU what its caches hold, on a GPU enough to keep it busy."""

MIN_ROWS = 256
"""Rows of a block whatever the vocabulary is: a product with fewer is slow."""

KEPT = 2**26
"""Values of the softmax that are kept for backward, 4 bytes each; more are computed again."""


@dataclass
class Head:
    """Where logits come from: `hidden` [N, h] of the rows that were asked for, the same on all
    tensor-parallel ranks, and this rank's `weight` [V / tp, h].

    The gradient of `hidden` must be the same on all tensor-parallel ranks too, as it is for
    everything that is computed by `logits` and by the functions of this module.
    """

    hidden: torch.Tensor
    weight: torch.Tensor

    def logits(self) -> torch.Tensor:
        """All of them, [N, V / tp], in the dtype of the model."""
        return F.linear(self.columns_input(), self.weight)

    def columns_input(self) -> torch.Tensor:
        """`hidden` for a use of this rank's columns alone: gradients are summed over the ranks."""
        return copy_to_tensor_model_parallel_region(self.hidden, parallel.tp_group())


class _Columns:
    """This rank's columns of logits / temperature, for blocks of the N rows."""

    def __init__(
        self, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float
    ) -> None:
        self.hidden, self.weight, self.temperature = hidden, weight, temperature
        self.group = parallel.tp_group()
        self.width = len(weight)
        column = targets - self.group.rank() * self.width
        self.own = (column >= 0) & (column < self.width)
        self.column = column.clamp(0, self.width - 1)[:, None]

    def blocks(self) -> Iterator[slice]:
        size = max(MIN_ROWS, BLOCK[self.hidden.device.type] // self.width)
        for start in range(0, len(self.hidden), size):
            yield slice(start, min(start + size, len(self.hidden)))

    def buffer(self, rows: int) -> torch.Tensor:
        return self.hidden.new_empty(rows, self.width, dtype=torch.float32)

    def logits(self, block: slice, out: torch.Tensor) -> torch.Tensor:
        """Of the rows of a block, float32 in `out`."""
        if self.hidden.dtype == torch.float32:
            torch.mm(self.hidden[block], self.weight.t(), out=out)
        else:
            out.copy_(self.hidden[block] @ self.weight.t())
        return out if self.temperature == 1.0 else out.div_(self.temperature)


@dataclass
class _Rows:
    """Of each row [N]: the largest logit on this rank, the logarithm of the normaliser over the
    whole vocabulary, the target's log-probability, the entropy; `kept` exp(logit - top)."""

    top: torch.Tensor
    log_norm: torch.Tensor
    value: torch.Tensor
    entropy: torch.Tensor
    kept: torch.Tensor | None


def _forward(columns: _Columns, with_entropy: bool, keep: bool) -> _Rows:
    count = len(columns.hidden)
    top, total, at_target, expected = columns.hidden.new_zeros(4, count, dtype=torch.float32)
    kept = columns.buffer(count) if keep else None
    buffer = None
    for block in columns.blocks():
        if kept is not None:
            z = kept[block]
        else:
            buffer = columns.buffer(block.stop - block.start) if buffer is None else buffer
            z = buffer[: block.stop - block.start]
        columns.logits(block, z)
        at_target[block] = z.gather(1, columns.column[block]).squeeze(1)
        top[block] = z.amax(dim=-1)
        z.sub_(top[block, None])
        p = z.exp() if with_entropy else z.exp_()
        total[block] = p.sum(dim=-1)
        if with_entropy:
            expected[block] = p.mul_(z).sum(dim=-1)
    return _over_ranks(columns, top, torch.stack((total, expected)), at_target, kept)


def _over_ranks(
    columns: _Columns,
    top: torch.Tensor,
    sums: torch.Tensor,
    at_target: torch.Tensor,
    kept: torch.Tensor | None,
) -> _Rows:
    """Put the ranks' parts together. `sums` [2, N]: of exp(z - top) and of exp(z - top) (z - top).

    Entropy of p = exp(z - m) / S, S = sum exp(z - m): log S - sum exp(z - m) (z - m) / S.
    """
    at_target = torch.where(columns.own, at_target, 0.0)
    highest = top
    if columns.group.size() > 1:
        highest = top.clone()
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=columns.group)
        sums[1] += sums[0] * (top - highest)
        sums *= (top - highest).exp()
        everything = torch.cat((sums, at_target[None]))
        dist.all_reduce(everything, group=columns.group)
        sums, at_target = everything[:2], everything[2]
    log_total = sums[0].log()
    log_norm = highest + log_total
    return _Rows(top, log_norm, at_target - log_norm, log_total - sums[1] / sums[0], kept)


class _Tokens(torch.autograd.Function):
    """Log-probability and entropy of each row; the entropy is empty when it is not asked for.

    With z = logits / T, p = softmax(z), H = -sum p log p: dH/dz_j = -p_j (log p_j + H) and
    d log p_t/dz_j = [j = t] - p_j.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        with_entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.columns = _Columns(hidden, weight, targets, temperature)
        keep = not with_entropy and len(hidden) * len(weight) <= KEPT
        rows = _forward(ctx.columns, with_entropy, keep)
        ctx.rows, ctx.with_entropy = rows, with_entropy
        if not with_entropy:
            empty = rows.entropy.new_empty(0)
            ctx.mark_non_differentiable(empty)
            return rows.value, empty
        return rows.value, rows.entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        columns, rows = ctx.columns, ctx.rows
        of_value = grads[0] / columns.temperature
        of_entropy = grads[1] / columns.temperature if ctx.with_entropy else None
        hidden, weight = columns.hidden, columns.weight
        of_hidden = torch.empty_like(hidden)
        of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = torch.zeros_like(weight, dtype=torch.float32)
        buffer = None
        for block in columns.blocks():
            if rows.kept is None and buffer is None:
                buffer = columns.buffer(block.stop - block.start)
            grad = _of_logits(columns, rows, block, buffer, of_value, of_entropy).to(hidden.dtype)
            torch.mm(grad, weight, out=of_hidden[block])
            if of_weight is not None and weight.dtype == torch.float32:
                of_weight.addmm_(grad.t(), hidden[block])
            elif of_weight is not None:
                of_weight += grad.t() @ hidden[block]
        return (
            of_hidden,
            None if of_weight is None else of_weight.to(weight.dtype),
            None,
            None,
            None,
        )


def _of_logits(
    columns: _Columns,
    rows: _Rows,
    block: slice,
    buffer: torch.Tensor | None,
    of_value: torch.Tensor,
    of_entropy: torch.Tensor | None,
) -> torch.Tensor:
    """Gradient [n, V / tp] of the logits of a block's rows."""
    if rows.kept is not None:
        factor = of_value[block] * (rows.top[block] - rows.log_norm[block]).exp()
        grad = rows.kept[block].mul_(-factor[:, None])
    else:
        assert buffer is not None
        grad = columns.logits(block, buffer[: block.stop - block.start])
        grad.sub_(rows.log_norm[block, None])
        if of_entropy is None:
            grad.exp_().mul_(-of_value[block, None])
        else:
            p = grad.exp()
            grad.add_(rows.entropy[block, None]).mul_(of_entropy[block, None])
            grad.add_(of_value[block, None]).mul_(p).neg_()
    own = torch.where(columns.own[block], of_value[block], 0.0)
    return grad.scatter_add_(1, columns.column[block], own[:, None])


def token_log_probs(head: Head, targets: torch.Tensor, temperature: float) -> torch.Tensor:
    """log softmax(logits / temperature)[target], float32 [N].

    `targets` [N] int64 over the whole vocabulary. Backward may run once.
    """
    if not torch.is_grad_enabled():
        columns = _Columns(head.hidden, head.weight, targets, temperature)
        return _forward(columns, with_entropy=False, keep=False).value
    return _Tokens.apply(head.columns_input(), head.weight, targets, temperature, False)[0]


def log_probs_and_entropy(
    head: Head, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `token_log_probs` gives and the entropy of each row, both [N] and with gradients."""
    if not torch.is_grad_enabled():
        columns = _Columns(head.hidden, head.weight, targets, temperature)
        rows = _forward(columns, with_entropy=True, keep=False)
        return rows.value, rows.entropy
    return _Tokens.apply(head.columns_input(), head.weight, targets, temperature, True)
