"""A process group of one trainer rank and the engines, beside any default group."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

BACKENDS = {"gloo": "cpu", "nccl": "cuda"}


class WeightGroup:
    """Rank `rank` of `size`; rank 0 is the trainer and the source of every broadcast.

    The names under which the ranks meet are those of SGLang's `/init_weights_update_group`.
    Building it blocks until all ranks have come, at most `timeout_s`.

    Raises:
        RuntimeError: a rank did not come, or the backend is unknown to this torch.
    """

    def __init__(
        self, store: dist.Store, name: str, rank: int, size: int, backend: str, timeout_s: float
    ) -> None:
        timeout = timedelta(seconds=timeout_s)
        self.device = torch.device(BACKENDS[backend])
        for prefix in (name, f"{name}/", f"{self.device.type}/"):
            store = dist.PrefixStore(prefix, store)
        self._group: Any
        if backend == "gloo":
            self._group = dist.ProcessGroupGloo(store, rank, size, timeout)
        else:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group = dist.ProcessGroupNCCL(store, rank, size, options)
        self.rank = rank

    def broadcast(self, tensors: list[torch.Tensor]) -> None:
        """Give every rank the values of rank 0, in place; waits for the end.

        Raises RuntimeError when another rank is gone or too late; the group is of no use then.
        """
        options = dist.BroadcastOptions()
        options.rootRank = 0
        works = [self._group.broadcast([tensor], options) for tensor in tensors]
        for work in works:
            work.wait()


def host_store(size: int, timeout_s: float) -> dist.TCPStore:
    """The store at which the ranks meet, on a free port of all addresses; for rank 0."""
    return dist.TCPStore(
        "0.0.0.0",
        0,
        size,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
    )


def join_store(host: str, port: int, size: int, timeout_s: float) -> dist.TCPStore:
    """The same store, for the other ranks."""
    return dist.TCPStore(
        host,
        port,
        size,
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
    )
