"""Log-probabilities of given tokens from logits that are split over the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from miles_core.modeling import parallel


class _Softmax:
    """Softmax of logits [N, V / tp] over the whole vocabulary, in one float32 buffer.

    `p` [N, V / tp] are probabilities, `log_norm` [N] is the logarithm of the normaliser.
    """

    def __init__(self, logits: torch.Tensor, temperature: float) -> None:
        self.group = parallel.tp_group()
        self.p = logits.detach().float().div(temperature)  # a new buffer
        top = self.p.amax(dim=-1)
        self._reduce(top, dist.ReduceOp.MAX)
        self.p.sub_(top[:, None]).exp_()
        total = self.p.sum(dim=-1)
        self._reduce(total, dist.ReduceOp.SUM)
        self.p.div_(total[:, None])
        self.log_norm = top + total.log()

    def _reduce(self, x: torch.Tensor, op: Any) -> None:
        if self.group.size() > 1:
            dist.all_reduce(x, op=op, group=self.group)

    def own_columns(self, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Which targets [N] lie in this rank's part of the vocabulary, and their column there."""
        width = self.p.shape[-1]
        column = targets - self.group.rank() * width
        own = (column >= 0) & (column < width)
        return own, column.clamp(0, width - 1)

    def total(self, x: torch.Tensor) -> torch.Tensor:
        self._reduce(x, dist.ReduceOp.SUM)
        return x


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, temperature: float
    ) -> torch.Tensor:
        softmax = _Softmax(logits, temperature)
        own, column = softmax.own_columns(targets)
        at_target = logits.gather(1, column[:, None]).squeeze(1).float() / temperature
        value = softmax.total(torch.where(own, at_target, 0.0)) - softmax.log_norm
        ctx.save_for_backward(softmax.p, own, column)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        return value

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        p, own, column = ctx.saved_tensors
        scaled = grads[0] / ctx.temperature
        grad = p.mul_(-scaled[:, None])
        grad.scatter_add_(1, column[:, None], torch.where(own, scaled, 0.0)[:, None])
        return grad.to(ctx.dtype), None, None


def token_log_probs(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float
) -> torch.Tensor:
    """log softmax(logits / temperature)[target], float32 [N].

    `logits` [N, V / tp] of this rank, `targets` [N] int64 over the whole vocabulary. Backward may
    run once.
    """
    return _LogProbs.apply(logits, targets, temperature)


class _LogProbsAndEntropy(torch.autograd.Function):
    """With z = logits / T, p = softmax(z), H = -sum p log p: dH/dz_j = -p_j (log p_j + H)."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        softmax = _Softmax(logits, temperature)
        own, column = softmax.own_columns(targets)
        at_target = logits.gather(1, column[:, None]).squeeze(1).float() / temperature
        value = softmax.total(torch.where(own, at_target, 0.0)) - softmax.log_norm
        entropy = -softmax.total(torch.xlogy(softmax.p, softmax.p).sum(dim=-1))
        ctx.save_for_backward(softmax.p, own, column, entropy)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        return value, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        p, own, column, entropy = ctx.saved_tensors
        of_value, of_entropy = (grad / ctx.temperature for grad in grads)
        grad = torch.xlogy(p, p).addcmul_(p, entropy[:, None]).mul_(-of_entropy[:, None])
        grad.addcmul_(p, of_value[:, None], value=-1.0)
        grad.scatter_add_(1, column[:, None], torch.where(own, of_value, 0.0)[:, None])
        return grad.to(ctx.dtype), None, None


def token_log_probs_and_entropy(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `token_log_probs` gives and the entropy of each row, both [N] and with gradients.

    Costs one buffer of the logits' size more in backward than the log-probabilities alone.
    """
    return _LogProbsAndEntropy.apply(logits, targets, temperature)


@torch.no_grad()
def log_probs_and_entropy(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Without gradients: what `token_log_probs` gives and the entropy of each row, both [N]."""
    softmax = _Softmax(logits, temperature)
    own, column = softmax.own_columns(targets)
    scaled = (
        logits.float().div_(temperature)
        if logits.dtype != torch.float32
        else logits.div_(temperature)
    )
    at_target = scaled.gather(1, column[:, None]).squeeze(1)
    value = softmax.total(torch.where(own, at_target, 0.0)) - softmax.log_norm
    expected = softmax.total((softmax.p * scaled).sum(dim=-1))
    return value, softmax.log_norm - expected
