"""The state of every random generator of this rank."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from megatron.core import tensor_parallel

from miles_core.modeling import ON_CPU

# What numpy's own state is made of, in checkpoints that hold it as numpy gives it.
_EMPTY = np.empty(0, np.uint32)
SAFE: list[Any] = [np.ndarray, np.dtype, type(_EMPTY.dtype), _EMPTY.__reduce__()[0]]


def random_state() -> dict[str, Any]:
    """Plain values and tensors: torch, numpy and python, and on a GPU torch's generator there and
    megatron's of the tensor-parallel region."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": (kind, torch.from_numpy(np.array(keys)), *rest),
        "python": random.getstate(),
    }
    if not ON_CPU:
        state["cuda"] = torch.cuda.get_rng_state()
        state["megatron"] = dict(tensor_parallel.get_cuda_rng_tracker().get_states())
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Go on where `random_state` was; a generator that the other machine did not have is left."""
    torch.set_rng_state(state["torch"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.asarray(keys), *rest))
    random.setstate(state["python"])
    if not ON_CPU and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
        tensor_parallel.get_cuda_rng_tracker().set_states(state["megatron"])
