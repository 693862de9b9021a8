"""The trainer's side of a weight push: buckets into shared memory or over a group of ranks.

Every method is collective and in the same order on all ranks; only rank 0 has answers. The caller
tells the engines, between the calls, what to read.
"""

from __future__ import annotations

import socket
from typing import Any

import torch
import torch.distributed as dist

from miles_core.modeling import parallel
from miles_core.modeling.gpt import PolicyModel
from miles_core.modeling.hf_config import ModelSpec
from miles_core.modeling.weight_stream import NamedTensor, WeightStream
from miles_core.weights.digest import tensor_digest
from miles_core.weights.group import WeightGroup, host_store
from miles_core.weights.shared import SharedBuffer, machine_id, payload, room

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class WeightSender:
    """Sends the weights of a rank's model; one push at a time, from `begin` to `end`."""

    def __init__(self, bucket_size: int) -> None:
        self._bucket_size = bucket_size
        self._model: PolicyModel | None = None
        self._spec: ModelSpec | None = None
        self._plans: dict[tuple[str | None, bool], WeightStream] = {}
        self._stream: WeightStream | None = None
        self._shared: SharedBuffer | None = None
        self._store: dist.TCPStore | None = None
        self._group: WeightGroup | None = None
        self._buffer: torch.Tensor | None = None

    def attach(self, model: PolicyModel, spec: ModelSpec) -> None:
        """Name the model whose weights are sent."""
        self._model, self._spec = model, spec
        self._plans = {}

    def stream(self, dtype: str | None = None, changed_only: bool = False) -> WeightStream:
        """The weights in buckets; `changed_only` leaves out those that training cannot change.

        Collective when it is first asked for.
        """
        if self._model is None or self._spec is None:
            raise RuntimeError("the trainer has no model yet; call init first")
        plan = self._plans.get((dtype, changed_only))
        if plan is None:
            kind = None if dtype is None else DTYPES[dtype]
            only = _changing(self._model) if changed_only else None
            plan = WeightStream(self._model, self._spec, self._bucket_size, kind, only)
            self._plans[dtype, changed_only] = plan
        return plan

    def begin(self, dtype: str | None = None, changed_only: bool = False) -> dict[str, Any]:
        """Plan a push: `buckets`, each with (name, shape, dtype) of its tensors, and `total`, the
        bytes of all of them. A push that was left unfinished is given up."""
        self.end()
        self._stream = stream = self.stream(dtype, changed_only)
        buckets = [
            [(e.name, list(e.shape), str(e.dtype).removeprefix("torch.")) for e in bucket]
            for bucket in stream.buckets
        ]
        total = sum(entry.size for bucket in stream.buckets for entry in bucket)
        return {"buckets": buckets, "total": total}

    def share(self, number: int, readers: int) -> dict[str, Any]:
        """Put a bucket into shared memory, where it stays until the next call.

        Answers a payload for each of the readers, and the digest of each tensor by name.
        Raises MemoryError when shared memory has no room for the largest bucket.
        """
        stream = self._planned()
        if dist.get_rank() != 0:
            stream.collect(number, None)
            return {}
        if self._shared is None:
            self._shared = SharedBuffer(stream.largest)
        tensors = stream.collect(number, self._shared.bytes)
        return {
            "payloads": [payload(tensors) for _ in range(readers)],
            "digests": _digests(tensors),
        }

    def machine(self, dtype: str | None = None) -> dict[str, Any]:
        """Of rank 0: the id of its `machine`, the `room` in its shared memory, the bytes of the
        `largest` bucket, and whether the weights lie on a GPU (`cuda`)."""
        return {
            "machine": machine_id(),
            "room": room(),
            "largest": self.stream(dtype).largest,
            "cuda": parallel.device().type == "cuda",
        }

    def frozen(self) -> bool:
        """Whether there are weights that training cannot change."""
        some, every = self.stream(changed_only=True).buckets, self.stream().buckets
        return sum(map(len, some)) < sum(map(len, every))

    def host(self, engines: int, timeout_s: float) -> tuple[str, int]:
        """Open the place where the ranks of a group with the engines meet; address and port."""
        if dist.get_rank() != 0:
            return "", 0
        self._store = host_store(engines + 1, timeout_s)
        return _address(), self._store.port

    def join(self, name: str, engines: int, backend: str, timeout_s: float) -> dict[str, Any]:
        """Make that group, once all engines come too; `broken` says why it was not made."""
        if dist.get_rank() != 0:
            return {}
        assert self._store is not None, "call host first"
        try:
            self._group = WeightGroup(self._store, name, 0, engines + 1, backend, timeout_s)
        except RuntimeError as error:
            return {"broken": str(error)}
        return {}

    def broadcast(self, number: int) -> dict[str, Any]:
        """Send a bucket to the engines of the group, tensor by tensor; the `digests` by name.

        `broken` says why it failed, as when an engine is gone; the group is of no use then.
        """
        stream = self._planned()
        if dist.get_rank() != 0:
            stream.collect(number, None)
            return {}
        assert self._group is not None, "call join first"
        if self._buffer is None:
            self._buffer = torch.empty(stream.largest, dtype=torch.uint8, device=self._group.device)
        tensors = stream.collect(number, self._buffer)
        try:
            self._group.broadcast([tensor for _, tensor in tensors])
        except RuntimeError as error:
            return {"broken": str(error)}
        return {"digests": _digests(tensors)}

    def end(self) -> None:
        """Free what a push holds. Not collective."""
        if self._shared is not None:
            self._shared.close()
        self._stream = self._shared = self._group = self._store = self._buffer = None

    def _planned(self) -> WeightStream:
        if self._stream is None:
            raise RuntimeError("no push has begun")
        return self._stream


def _address() -> str:
    """The address by which other machines reach this one; loopback where there is no other."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # nothing is sent; the kernel picks a route
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def _digests(tensors: list[NamedTensor]) -> dict[str, str]:
    return {name: tensor_digest(tensor) for name, tensor in tensors}


def _changing(model: PolicyModel) -> set[str]:
    """Weights that training may change, by their names in the whole model. Collective."""
    if model.lora is not None:
        return model.lora.changed_weights()
    mine = {
        model.global_name(name)
        for name, tensor in model.stored_tensors()
        if tensor.requires_grad or not isinstance(tensor, torch.nn.Parameter)
    }
    everywhere: list[set[str]] = [set() for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, mine)
    return set().union(*everywhere)
