"""A weight update in parts: a window that is opened, filled with tensors, and closed.

What comes is put together beside the served weights, and takes their place between two steps when
the window closes and everything is as it was announced. Whatever goes wrong before changes
nothing: the engine serves what it served.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from miles_core.engines.sampling import RequestError
from miles_core.engines.weights import Staging, WeightError, hf_tensors
from miles_core.weights.digest import state_digest, tensor_digest
from miles_core.weights.group import WeightGroup, join_store
from miles_core.weights.shared import NamedTensor, PayloadError, read_payload

if TYPE_CHECKING:
    from miles_core.engines.engine import Engine

GROUP_TIMEOUT_S = 300.0
_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


@dataclass
class _Window:
    """An open update. `announced`: its pusher names the version first and the digest last."""

    announced: bool
    version: str | None
    partial: bool
    staging: Staging | None = None
    digests: dict[str, str] = field(default_factory=dict)
    size: int = 0
    fault: str | None = None


class WeightUpdates:
    """The updates of an engine; methods block and may be called from any thread.

    `held` has the digest, as it was sent, of every tensor that is served; it is empty unless all
    of them came through a window.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._mutex = threading.Lock()
        self._window: _Window | None = None
        self._groups: dict[str, WeightGroup] = {}
        self.held: dict[str, str] = {}

    @property
    def is_open(self) -> bool:
        return self._window is not None

    def begin(self, version: str | None = None, base: str | None = None) -> None:
        """Open a window; no token is sampled while it is open.

        With `version` the end must announce a digest. With `base`, the digest of all tensors that
        are served, as they were sent, only those that differ need be sent.

        Raises RequestError: one is open already, or something else is served than `base`.
        """
        with self._mutex:
            if self._window is not None:
                raise RequestError("a weight update is open already; post /end_weight_update")
            if base is not None and (not self.held or state_digest(self.held) != base):
                raise RequestError("the served weights are not the base of this update; send all")
            self._engine.hold(True).result()
            self._window = _Window(version is not None, version, base is not None)

    def from_payload(self, payloads: Sequence[str], version: str | None) -> None:
        """Take tensors that lie in the pusher's shared memory; this engine has one rank."""
        with self._mutex, self._filling() as window:
            if len(payloads) != 1:
                raise WeightError(f"{len(payloads)} payloads came for one rank")
            window.version = version or window.version
            self._put(window, read_payload(payloads[0]))

    def join(
        self, name: str, host: str, port: int, rank: int, size: int, backend: str, timeout_s: float
    ) -> None:
        """Join a group with the pusher. Raises RequestError when that does not succeed."""
        if backend != "gloo":
            raise RequestError(f"backend {backend!r}: this engine runs on CPU; use gloo")
        try:
            store = join_store(host, port, size, timeout_s)
            group = WeightGroup(store, name, rank, size, backend, timeout_s)
        except (RuntimeError, ValueError) as error:
            raise RequestError(f"the group {name} was not built: {error}") from error
        self._groups[name] = group

    def leave(self, name: str) -> None:
        """Leave a group. Raises RequestError for one that was not joined."""
        if self._groups.pop(name, None) is None:
            raise RequestError(f"there is no group {name!r}")

    def from_group(
        self,
        name: str,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        version: str | None,
    ) -> None:
        """Take tensors that the pusher broadcasts, in this order."""
        with self._mutex, self._filling() as window:
            group = self._groups.get(name)
            if group is None:
                raise WeightError(f"there is no group {name!r}; post /init_weights_update_group")
            window.version = version or window.version
            try:
                tensors = [
                    torch.empty(tuple(shape), dtype=_DTYPES[dtype.removeprefix("torch.")])
                    for dtype, shape in zip(dtypes, shapes, strict=True)
                ]
                named = list(zip(names, tensors, strict=True))
            except (KeyError, TypeError, ValueError) as error:
                raise WeightError(f"names, dtypes and shapes are no tensors: {error}") from error
            try:
                group.broadcast(tensors)
            except RuntimeError as error:
                self._groups.pop(name)
                raise WeightError(f"the broadcast broke off: {error}") from error
            self._put(window, named)

    def end(self, announced: dict[str, Any]) -> str:
        """Close the window and serve what came; answers what happened.

        `announced` has `digest`, `tensors` and `bytes` of all that was sent, and must when `begin`
        had a version. Without any tensor nothing changes.

        Raises RequestError: what came is not whole; the engine serves what it served.
        """
        with self._mutex, torch.inference_mode():
            window, self._window = self._window, None
            try:
                if window is None:
                    return "no weight update was open"
                if window.staging is None and window.fault is None and not window.announced:
                    return "weight update closed; nothing was sent"
                self._commit(window, announced)
            except WeightError as error:
                raise RequestError(f"the update was dropped: {error}") from error
            finally:
                self._engine.hold(False).result()
            return f"serving version {self._engine.version}"

    def digest(self) -> dict[str, Any]:
        """Version, digest and number of the tensors that are served, read back from their places.

        Raises RequestError when there are none, or they are not as they were given.
        """
        engine = self._engine
        version, weights = engine.call(
            lambda: (engine.version, engine.scheduler.decoder.loaded)
        ).result()
        if weights is None:
            raise RequestError("the engine holds no weights yet")
        with torch.inference_mode():
            try:
                found = {n: tensor_digest(t) for n, t in hf_tensors(weights, engine.shape)}
            except WeightError as error:
                raise RequestError(str(error)) from error
        return {"weight_version": version, "digest": state_digest(found), "tensors": len(found)}

    # -- parts ---------------------------------------------------------------------------------

    def _filling(self) -> _Filling:
        return _Filling(self._window)

    def _put(self, window: _Window, tensors: list[NamedTensor]) -> None:
        if window.staging is None:
            base = self._engine.scheduler.decoder.loaded if window.partial else None
            window.staging = Staging(self._engine.shape, self._engine.dtype, base)
        for name, tensor in tensors:
            window.staging.put(name, tensor)
            window.digests[name] = tensor_digest(tensor)
            window.size += tensor.numel() * tensor.element_size()

    def _commit(self, window: _Window, announced: dict[str, Any]) -> None:
        """Serve what a window brought. Raises WeightError when it is not what was announced."""
        if window.fault is not None:
            raise WeightError(window.fault)
        if window.staging is None:
            raise WeightError("no tensor came")
        found = {
            "digest": state_digest(window.digests),
            "tensors": len(window.digests),
            "bytes": window.size,
        }
        for name, value in found.items():
            if window.announced and announced.get(name) != value:
                raise WeightError(f"{name} is {value}, announced was {announced.get(name)!r}")
        version = window.version
        if version is not None and not (version.isascii() and version.isdigit()):
            raise WeightError(f"weight_version must hold an integer, not {version!r}")
        self._engine.serve(window.staging.finish(), version)
        self.held = {**(self.held if window.partial else {}), **window.digests}


class _Filling:
    """Work on an open window; a failure stays in it, so that it cannot be closed with success."""

    def __init__(self, window: _Window | None) -> None:
        self._window = window
        self._mode = torch.inference_mode()

    def __enter__(self) -> _Window:
        if self._window is None:
            raise RequestError("no weight update is open; post /begin_weight_update first")
        if self._window.fault is not None:
            raise RequestError(f"the update has failed: {self._window.fault}")
        self._mode.__enter__()
        return self._window

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._mode.__exit__(kind, error, trace)
        if error is None or self._window is None:
            return
        self._window.fault = str(error) or type(error).__name__
        self._window.staging = None
        if isinstance(error, (WeightError, PayloadError)):
            raise RequestError(str(error)) from error
