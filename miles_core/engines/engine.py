"""The engine: one thread that runs the scheduler, and the calls that other threads make on it."""

from __future__ import annotations

import threading
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from miles_core.engines.kv import KVPool
from miles_core.engines.model import Decoder
from miles_core.engines.record import Recorder
from miles_core.engines.request import Request
from miles_core.engines.sampling import RequestError, Sampler
from miles_core.engines.scheduler import Scheduler
from miles_core.engines.shape import read_eos, read_shape
from miles_core.engines.text import TextCodec
from miles_core.engines.updates import WeightUpdates
from miles_core.engines.weight_files import load_weights
from miles_core.engines.weights import DTYPES, Weights

PAUSE_MODES = ("abort", "retract", "in_place")
T = TypeVar("T")


@dataclass(frozen=True)
class EngineOptions:
    """How an engine is made; the fields are the server's flags.

    With the load format `dummy` the engine holds no weights until some are pushed.
    """

    model: Path
    load_format: str = "auto"
    dtype: str = "float32"
    max_running_requests: int = 32
    max_total_tokens: int = 65536
    record_dir: Path | None = None
    seed: int = 0


class Engine:
    """A served model. Public methods may be called from any thread.

    The engine's own thread alone touches the scheduler; calls are queued and run between two
    steps. `on_death(error)` is called when a step fails, after every request was ended.
    """

    def __init__(self, options: EngineOptions, on_death: Callable[[BaseException], None]) -> None:
        self.options = options
        self.shape = read_shape(options.model)
        self.dtype = DTYPES[options.dtype]
        self.codec = TextCodec(options.model)
        self.context_length = min(self.shape.context_length, options.max_total_tokens)
        with torch.inference_mode():
            pool = KVPool(self.shape, options.max_total_tokens, self.dtype)
            decoder = Decoder(self.shape, self.dtype, pool, self.context_length)
            if options.load_format != "dummy":
                decoder.loaded = load_weights(options.model, self.shape, self.dtype)
        self.scheduler = Scheduler(
            decoder,
            Sampler(options.seed),
            self.codec,
            read_eos(options.model),
            options.max_running_requests,
            self._finished,
        )
        self.recorder = Recorder(options.record_dir) if options.record_dir else None
        self.model_path = str(options.model)
        self.updates = WeightUpdates(self)
        self.paused = False
        self.alive = True
        self._on_death = on_death
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._arrivals: deque[Request] = deque()
        self._wake = threading.Event()
        self._update = threading.Lock()
        self._held = False
        self._stopping = False
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)

    @property
    def version(self) -> str:
        """Version of the weights, an integer in a string."""
        return self.scheduler.version

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End every request and the thread."""
        self._stopping = True
        self._wake.set()
        self._thread.join()
        if self.recorder:
            self.recorder.close()

    def submit(self, request: Request) -> None:
        """Queue a request; its `notify` is called from the engine's thread."""
        self._arrivals.append(request)
        self._wake.set()

    def call(self, action: Callable[[], T]) -> Future[T]:
        """Run `action` in the engine's thread between two steps."""
        future: Future[T] = Future()
        if not self.alive:
            future.set_exception(RuntimeError("the engine has stopped"))
            return future
        self._calls.append((action, future))
        self._wake.set()
        return future

    def abort(self, rid: str | None, message: str) -> Future[int]:
        """End one request, or all when `rid` is None."""
        return self.call(lambda: self.scheduler.abort(rid, message))

    def pause(self, mode: str) -> Future[int]:
        """Sample no token until `resume`; arriving requests wait.

        `abort` ends what runs or waits, `retract` queues it again and drops its cache, `in_place`
        leaves it as it stands. Answers the number of requests that were ended or held.
        """
        if mode not in PAUSE_MODES:
            raise RequestError(f"mode must be one of {', '.join(PAUSE_MODES)}, not {mode!r}")

        def action() -> int:
            self.paused = True
            if mode == "abort":
                return self.scheduler.abort(None, "aborted by pause_generation")
            if mode == "retract":
                return self.scheduler.retract_all()
            return len(self.scheduler.running)

        return self.call(action)

    def resume(self) -> Future[None]:
        """End a pause."""
        return self.call(lambda: setattr(self, "paused", False))

    def hold(self, held: bool) -> Future[None]:
        """Sample no token until it is taken back; independent of pauses."""
        return self.call(lambda: setattr(self, "_held", held))

    @property
    def has_weights(self) -> bool:
        """Whether there is anything to serve."""
        return self.scheduler.decoder.loaded is not None

    def serve(self, weights: Weights, version: str | None) -> None:
        """Put weights in place between two steps; blocks. Without `version`, the next integer is
        taken. Prefixes of finished sequences are forgotten."""

        def swap() -> None:
            self.scheduler.decoder.loaded = weights
            self.scheduler.version = str(int(version or int(self.scheduler.version) + 1))
            self.scheduler.flush()

        self.call(swap).result()

    def flush(self) -> Future[None]:
        """Forget the prefixes of finished sequences."""
        return self.call(self.scheduler.flush)

    def update_weights(
        self, directory: Path, version: str | None, abort_all: bool, flush: bool, keep_pause: bool
    ) -> int:
        """Load a directory and serve it under `version`; blocks. Answers how many were held.

        The files are read beside the running engine and put in place between two steps, so a
        failed load changes nothing. Without `version`, the next integer is taken.

        Raises:
            ModelDirectoryError: the directory cannot be loaded.
            RequestError: `version` is not an integer.
        """
        if version is not None and not (version.isascii() and version.isdigit()):
            raise RequestError(f"weight_version must hold an integer, not {version!r}")
        with self._update, torch.inference_mode():
            weights = load_weights(directory, self.shape, self.dtype)

            def swap() -> int:
                scheduler = self.scheduler
                if abort_all:
                    scheduler.abort(None, "aborted by update_weights_from_disk")
                scheduler.decoder.loaded = weights
                self.updates.held = {}
                scheduler.version = str(int(version or int(scheduler.version) + 1))
                if flush:
                    scheduler.flush()
                held = len(scheduler.running) if self.paused else 0
                if not keep_pause:
                    self.paused = False
                self.model_path = str(directory)
                return held

            return self.call(swap).result()

    # -- the thread ----------------------------------------------------------------------------

    def _finished(self, request: Request) -> None:
        if self.recorder:
            self.recorder.write(request, self.version)

    def _main(self) -> None:
        try:
            with torch.inference_mode():
                self._run()
        # Whatever breaks a step ends the engine: its state cannot be trusted any more.
        except BaseException as error:
            traceback.print_exc()
            self._close(f"the engine failed: {error}")
            self._on_death(error)
        else:
            self._close("the engine was stopped")

    def _run(self) -> None:
        scheduler = self.scheduler
        while not self._stopping:
            self._wake.clear()
            while self._arrivals:
                scheduler.add(self._arrivals.popleft())
            while self._calls:
                self._answer(*self._calls.popleft())
            if scheduler.busy and not self.paused and not self._held:
                scheduler.step()
            else:
                self._wake.wait()

    @staticmethod
    def _answer(action: Callable[[], Any], future: Future[Any]) -> None:
        try:
            future.set_result(action())
        except RequestError as error:
            future.set_exception(error)

    def _close(self, message: str) -> None:
        """End everything that waits for an answer."""
        self.alive = False
        while self._arrivals:
            self.scheduler.add(self._arrivals.popleft())
        self.scheduler.abort(None, message)
        while self._calls:
            self._calls.popleft()[1].set_exception(RuntimeError(message))
