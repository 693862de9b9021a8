"""What one rank computes of a micro-batch: packed or padded, cut for context parallelism."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams

from miles_core.modeling import parallel


def rounded_up(length: int, unit: int) -> int:
    """The next multiple of `unit`."""
    return -(-length // unit) * unit


@dataclass
class Segments(PackedSeqParams):  # type: ignore[misc]
    """megatron's bounds of the segments; `own_sizes`: the tokens that this rank holds of each.

    On the host, since attention asks for them in every layer.
    """

    own_sizes: list[int] = field(default_factory=list)


class Cut:
    """This rank's share of segments that lie one behind the other.

    Packed, the segments stay one behind the other and never see each other; padded, each is a row.
    With c context-parallel ranks a segment is padded at its end to 2 c equal chunks, of which rank
    r holds the chunks r and 2 c - 1 - r, so that causal attention costs all ranks the same. With
    sequence parallelism what a rank holds is a multiple of the tensor-parallel size. Padding comes
    after all that is real, so nothing real sees it.

    `tokens` [b, s] int64 (packed: b = 1) are this rank's, `rows` [n] the places in s * b of the
    logits that were asked for, `places` [n] where those stand among all N that were asked for.
    """

    def __init__(
        self,
        tokens: torch.Tensor,
        lengths: list[int],
        rows: torch.Tensor,
        packed: bool,
        sequence_parallel: bool,
    ) -> None:
        self._group = parallel.cp_group()
        self._total = len(rows)
        self._total_tokens = len(tokens)
        chunks = 2 * self._group.size() if self._group.size() > 1 else 1
        self._tensor = parallel.tp_group().size() if sequence_parallel else 1
        self._sizes = self._padded(lengths, packed, chunks, chunks * self._tensor)
        sizes = torch.tensor(self._sizes)
        starts = (sizes.cumsum(0) - sizes) // self._group.size()
        segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        offset = torch.cat([torch.arange(length) for length in lengths])
        owner, local = self._place(offset, (sizes // chunks)[segment])
        if packed:
            place = logits_at = starts[segment] + local
            shape = (1, sum(self._sizes) // self._group.size())
        else:
            shape = (len(lengths), self._sizes[0] // self._group.size())
            place, logits_at = starts[segment] + local, local * shape[0] + segment
        device = tokens.device
        own = owner == self._group.rank()
        self._sources, self._states_at = own.nonzero().squeeze(1), logits_at[own]
        mine = own.to(device)
        self.tokens = torch.zeros(shape[0] * shape[1], dtype=torch.int64, device=device)
        self.tokens[place.to(device)[mine]] = tokens[mine]
        self.tokens = self.tokens.view(shape)
        self.places = mine[rows].nonzero().squeeze(1)
        self.rows = logits_at.to(device)[rows[self.places]]
        self.packing = self._packing(device) if packed else None

    @staticmethod
    def _padded(lengths: list[int], packed: bool, chunk: int, total: int) -> list[int]:
        """Padded size of every segment; packed, only their sum is a multiple of `total`."""
        if not packed:
            return [rounded_up(max(lengths), total)] * len(lengths)
        sizes = [rounded_up(length, chunk) for length in lengths]
        sizes[-1] += rounded_up(sum(sizes), total) - sum(sizes)
        return sizes

    def _place(
        self, offset: torch.Tensor, chunk: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Context-parallel rank of each token, and its offset in the part of its segment there."""
        ranks = self._group.size()
        if ranks == 1:
            return torch.zeros_like(offset), offset
        number = offset // chunk
        second = number >= ranks
        owner = torch.where(second, 2 * ranks - 1 - number, number)
        return owner, offset % chunk + second * chunk

    def _packing(self, device: torch.device) -> Segments:
        bounds = torch.tensor([0, *self._sizes]).cumsum(0).to(device, torch.int32)
        longest = max(self._sizes)
        return Segments(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            own_sizes=[size // self._group.size() for size in self._sizes],
        )

    def states(self, values: torch.Tensor, fill: int) -> torch.Tensor:
        """From `values` [T, ...] of the tokens those of the hidden states that this rank has, in
        their order, on the device of the tokens; padding has `fill`."""
        own = values.new_full((self.tokens.numel(), *values.shape[1:]), fill)
        own[self._states_at] = values[self._sources]
        return own.chunk(self._tensor)[self._tensor_rank()].to(self.tokens.device)

    def whole_states(self, own: torch.Tensor, fill: int) -> torch.Tensor:
        """Inverse of `states`, on every tensor- and context-parallel rank: [T, ...] on the CPU.

        Values must be at least `fill`, the integer that marks what a rank does not have.
        Collective over these ranks.
        """
        places = self.tokens.numel() // self._tensor
        every = own.new_full((self._tensor, places, *own.shape[1:]), fill)
        every[self._tensor_rank()] = own
        flat = every.flatten(0, 1)
        whole = flat.new_full((self._total_tokens, *own.shape[1:]), fill, dtype=torch.int32)
        whole[self._sources.to(own.device)] = flat[self._states_at.to(own.device)].int()
        group = parallel.tp_and_cp_group()
        if group.size() > 1:
            dist.all_reduce(whole, op=dist.ReduceOp.MAX, group=group)
        return whole.to("cpu", own.dtype)

    def _tensor_rank(self) -> int:
        return parallel.tp_group().rank() if self._tensor > 1 else 0

    def join(self, values: torch.Tensor) -> torch.Tensor:
        """From this rank's values [n] the values [N] of all, on every context-parallel rank.

        Backward hands each rank the gradient of its own: the ranks compute one and the same loss.
        """
        if self._group.size() == 1:
            return values
        full = values.new_zeros(self._total).index_put((self.places,), values)
        return _SumForward.apply(full, self._group)


class _SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        out = x.clone()
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None
