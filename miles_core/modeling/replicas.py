"""Whether ranks that hold the same weights still do, and whether weights are finite.

Each rank reads its weights once: a sum of their bits and a norm for each parameter. What crosses
the network is two numbers for each parameter.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from miles_core.modeling import parallel
from miles_core.modeling.gpt import PolicyModel

# Ranks of tensor parallelism compute the gradients of what they share each by itself.
TENSOR_TOLERANCE = 1e-4


def bit_sum(values: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor as integers, summed modulo 2^64: int64 []."""
    flat = values.detach().contiguous().flatten()
    size = flat.element_size()
    if flat.numel() * size % 8 == 0 and flat.storage_offset() * size % 8 == 0:
        return flat.view(torch.int64).sum()
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[size]
    return flat.view(whole).sum(dtype=torch.int64)


def spread(values: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest and largest of each value over the ranks of a group. Collective."""
    low, high = values.clone(), values.clone()
    if group.size() > 1:
        dist.all_reduce(low, op=dist.ReduceOp.MIN, group=group)
        dist.all_reduce(high, op=dist.ReduceOp.MAX, group=group)
    return low, high


class Replicas:
    """The parameters of a model by the groups of ranks that hold equal ones."""

    def __init__(self, model: PolicyModel) -> None:
        named = [(model.global_name(name), param) for name, param in model.named_parameters()]
        self._everything = named
        # with expert parallelism the copies of an expert are fewer than data-parallel ranks
        experts = [pair for pair in named if not getattr(pair[1], "allreduce", True)]
        dense = [pair for pair in named if getattr(pair[1], "allreduce", True)]
        self._equal = [
            (dense, parallel_state.get_data_parallel_group(with_context_parallel=True)),
            (experts, parallel_state.get_expert_data_parallel_group()),
        ]
        self._alike = [
            pair for pair in dense if not getattr(pair[1], "tensor_model_parallel", False)
        ]
        self._tied = self._tied_over_stages(model)

    @staticmethod
    def _tied_over_stages(model: PolicyModel) -> torch.Tensor | None:
        tied = model.share_embeddings_and_output_weights
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        if not tied or stages == 1 or not parallel_state.is_rank_in_embedding_group():
            return None
        weight: torch.Tensor = model.shared_embedding_or_output_weight()
        return weight

    def non_finite(self) -> list[str]:
        """Names of this rank's parameters with a value that is not finite."""
        return self._names(self._everything, ~torch.isfinite(self._norms(self._everything)))

    def diverged(self) -> list[str]:
        """Names of parameters that differ between ranks that should hold equal ones; each rank
        sees those of its own groups. Collective."""
        found: list[str] = []
        for named, group in self._equal:
            low, high = spread(self._bits(named), group)
            found += self._names(named, low != high)
        low, high = spread(self._norms(self._alike), parallel.tp_group())
        found += self._names(self._alike, ~(high - low <= TENSOR_TOLERANCE * high))
        if self._tied is not None:
            group = parallel_state.get_embedding_group()
            low, high = spread(bit_sum(self._tied).reshape(1), group)
            if not torch.equal(low, high):
                found.append("tied embedding of the first and the last pipeline stage")
        return found

    @staticmethod
    def _names(named: list[tuple[str, torch.nn.Parameter]], at: torch.Tensor) -> list[str]:
        return [named[i][0] for i in at.nonzero().flatten().tolist()]

    @staticmethod
    def _bits(named: list[tuple[str, torch.nn.Parameter]]) -> torch.Tensor:
        if not named:
            return torch.zeros(0, dtype=torch.int64, device=parallel.device())
        return torch.stack([bit_sum(param) for _, param in named])

    @staticmethod
    def _norms(named: list[tuple[str, torch.nn.Parameter]]) -> torch.Tensor:
        if not named:
            return torch.zeros(0, device=parallel.device())
        norms = [
            torch.linalg.vector_norm(param.detach(), dtype=torch.float32) for _, param in named
        ]
        return torch.stack(norms)
