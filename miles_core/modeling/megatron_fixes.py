"""What megatron-core 0.16.1 gets wrong without Transformer Engine, and on the CPU.

| place | wrong | put right |
|---|---|---|
| router, fp32 scores | the name `te_general_gemm` is unbound | None |
| latent attention | `HAVE_TE` is true over a stand-in class | False |
| latent attention, tensor parallel | see `complete_latent` | a hook on the projection |
| tensor parallel layers that draw no weights | these are not marked as cut | `mark_cut` |
| dispatcher with expert parallelism (CPU) | sizes that are not on CUDA stay tensors | to numpy |
| recompute (CPU) | saves and restores the state of a CUDA generator | an empty state |
| dropout (CPU; the rate is 0) | wants a CUDA generator of each rank | none |
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils, token_dispatcher

from miles_core.modeling import ON_CPU

if not hasattr(moe_utils, "te_general_gemm"):
    moe_utils.te_general_gemm = None
if not isinstance(multi_latent_attention.TELinear, type):
    multi_latent_attention.HAVE_TE = False


def _to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _no_state(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.empty(0)


def _restore_nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _no_state_of_its_own(*args: Any, **kwargs: Any) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


if ON_CPU:
    moe_utils.maybe_move_tensor_to_cpu = _to_cpu
    token_dispatcher.maybe_move_tensor_to_cpu = _to_cpu
    megatron_random._get_cuda_rng_state = _no_state
    megatron_random._set_cuda_rng_state = _restore_nothing
    megatron_random.CudaRNGStatesTracker.fork = _no_state_of_its_own


def mark_cut(model: torch.nn.Module) -> None:
    """Say of the weights of tensor parallel layers that each rank has a part of its own.

    megatron does it as it draws them. What is not marked counts for one rank alone in the
    gradient's norm, and is compared between ranks.
    """
    for module in model.modules():
        rows = isinstance(module, tensor_parallel.RowParallelLinear)
        columns = (tensor_parallel.ColumnParallelLinear, tensor_parallel.VocabParallelEmbedding)
        if (rows or isinstance(module, columns)) and module.weight is not None:
            tensor_parallel.set_tensor_model_parallel_attributes(module.weight, True, int(rows), 1)


def complete_latent(attention: Any) -> None:
    """Make the down projection of keys and values give its whole width on every rank.

    For tensor with sequence parallelism. megatron gathers the columns after it, which hands each
    rank the gradient of its own columns alone. That is all of it for the latent, but the rotated
    key is used by the heads of every rank. Given the whole width of its part of the sequence,
    megatron gathers the rotated key itself, with a backward pass that sums over the ranks.
    """

    def gather(module: Any, args: Any, output: tuple[torch.Tensor, Any]) -> tuple[Any, Any]:
        whole = tensor_parallel.gather_from_tensor_model_parallel_region(output[0])
        return tensor_parallel.scatter_to_sequence_parallel_region(whole), output[1]

    attention.linear_kv_down_proj.register_forward_hook(gather)
