"""The process group of the trainer's ranks, and megatron's groups over it."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from miles_core.modeling import ON_CPU

COLLECTIVE_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class Layout:
    """Where this rank stands. `lead`: the first of the ranks that work on the same samples."""

    rank: int
    world_size: int
    dp_rank: int
    dp_size: int
    tp_rank: int
    tp_size: int
    lead: bool


def start(
    rank: int,
    world_size: int,
    master_addr: str,
    master_port: int,
    tp_size: int,
    seed: int,
    pp_size: int = 1,
    cp_size: int = 1,
    ep_size: int = 1,
    listener: int | None = None,
) -> Layout:
    """Join the ranks (gloo on CPU, nccl on GPU) and seed the weights' generator alike on all.

    Sizes of tensor, pipeline, context and expert parallelism; what remains is data parallelism.
    A single rank needs no address and opens no port. `listener`: on rank 0, a socket that listens
    at the address already, which is taken over.
    """
    if world_size % (tp_size * pp_size * cp_size):
        raise ValueError(
            f"{world_size} ranks are not a multiple of tensor parallel size {tp_size} x pipeline "
            f"parallel size {pp_size} x context parallel size {cp_size}"
        )
    backend = "gloo" if ON_CPU else "nccl"
    if not ON_CPU:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    if world_size == 1:
        store: dist.Store = dist.HashStore()
    else:
        store = dist.TCPStore(
            master_addr,
            master_port,
            world_size,
            rank == 0,
            timeout=timedelta(minutes=5),
            master_listen_fd=listener if rank == 0 else None,
        )
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp_size,
        pipeline_model_parallel_size=pp_size,
        context_parallel_size=cp_size,
        expert_model_parallel_size=ep_size,
        # experts are cut like everything else, unless they are spread over ranks whole
        expert_tensor_parallel_size=tp_size if ep_size == 1 else 1,
    )
    torch.manual_seed(seed)
    if not ON_CPU:
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return Layout(
        rank=rank,
        world_size=world_size,
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        tp_size=tp_size,
        lead=parallel_state.get_model_parallel_group().rank() == 0
        and parallel_state.get_context_parallel_rank() == 0,
    )


def stop() -> None:
    """Leave the groups; the process may `start` again. Let go of the model before.

    A gloo group has threads, which wake up a hundred times a second until nothing refers to it:
    models and optimizers do, in cycles.
    """
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()


def device() -> torch.device:
    """The device of this rank's model."""
    return torch.device("cpu") if ON_CPU else torch.device("cuda", torch.cuda.current_device())


def tp_group() -> dist.ProcessGroup:
    """The tensor-parallel group."""
    return parallel_state.get_tensor_model_parallel_group()


def experts_are_spread() -> bool:
    """Whether data-parallel ranks hold different experts."""
    return parallel_state.get_expert_model_parallel_world_size() > 1


def cp_group() -> dist.ProcessGroup:
    """The context-parallel group."""
    return parallel_state.get_context_parallel_group()


def tp_and_cp_group() -> dist.ProcessGroup:
    """The ranks that share out the tokens of a micro-batch, or hold them alike."""
    return parallel_state.get_tensor_and_context_parallel_group()


def expert_tp_group() -> dist.ProcessGroup:
    """The group over which routed experts are cut."""
    return parallel_state.get_expert_tensor_parallel_group()


def dp_group() -> dist.ProcessGroup:
    """The data-parallel group."""
    return parallel_state.get_data_parallel_group()
