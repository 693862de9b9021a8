"""What megatron-core sees in place of `torch.cuda` where there is no CUDA."""

from __future__ import annotations

import contextlib
from typing import Any

import torch


class _Idle:
    """A stream or event on which nothing is ever pending."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def query(self) -> bool:
        return True

    def record_event(self, *args: Any) -> _Idle:
        return _Idle()

    def elapsed_time(self, other: _Idle) -> float:
        return 0.0

    def _nothing(self, *args: Any) -> None:
        return None

    record = wait = wait_stream = wait_event = synchronize = _nothing


class CpuCuda:
    """What megatron sees in place of `torch.cuda`."""

    Stream = _Idle
    Event = _Idle

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def current_stream(self, *args: Any) -> _Idle:
        return _Idle()

    default_stream = current_stream

    def stream(self, stream: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def get_rng_state(self, *args: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def memory_allocated(self, *args: Any) -> int:
        return 0

    max_memory_allocated = memory_allocated

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        return None

    set_device = synchronize = empty_cache = manual_seed = set_rng_state = _nothing
