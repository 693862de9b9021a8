"""Continuous batching: which sequences run, which wait, and one step of all that run.

Everything here belongs to the engine's thread. A request holds an extent for its prompt and all
that it may generate, so that a request that was admitted can always finish; others wait. Finished
sequences keep their keys and values until the room is needed, and a new request whose ids start
alike copies or takes over that prefix.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from miles_core.engines.kv import Extent
from miles_core.engines.model import Decoder, Segment
from miles_core.engines.request import Request
from miles_core.engines.sampling import Sampler
from miles_core.engines.text import TextCodec

STEP_TOKENS = 2048
MIN_SHARED = 16
KEPT_PER_SLOT = 4


@dataclass(eq=False)
class Kept:
    """Keys and values of a finished sequence: `tokens` holds the ids that they belong to."""

    tokens: np.ndarray
    extent: Extent


def shared_prefix(a: np.ndarray, b: np.ndarray, beyond: int) -> int:
    """Length of the longest common prefix, or 0 when it is no longer than `beyond`."""
    size = min(len(a), len(b))
    # Almost all candidates fall here, without a comparison of the whole.
    if size <= beyond or a[beyond] != b[beyond]:
        return 0
    different = np.flatnonzero(a[:size] != b[:size])
    return int(different[0]) if len(different) else size


class Scheduler:
    """Requests of one engine and the step that moves them on.

    `finished(request)` is called once for each request that ends, before its own `notify`.
    """

    def __init__(
        self,
        decoder: Decoder,
        sampler: Sampler,
        codec: TextCodec,
        eos: frozenset[int],
        max_running: int,
        finished: Callable[[Request], None],
    ) -> None:
        self.decoder = decoder
        self.pool = decoder.pool
        self.sampler = sampler
        self.codec = codec
        self.eos = eos
        self.max_running = max_running
        self.finished = finished
        self.version = "0"
        self.epoch = 0
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.kept: list[Kept] = []

    @property
    def busy(self) -> bool:
        """Whether a step would do something."""
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queue a request, or end it at once when it asks for no token."""
        if request.limit == 0:
            self._end(request, {"type": "length", "length": 0})
        else:
            self.waiting.append(request)

    def abort(self, rid: str | None, message: str) -> int:
        """End the requests whose id is `rid` or starts with `rid_`, or all when it is None.

        They answer with what was generated so far. Returns their number.
        """
        hit = [
            r
            for r in (*self.waiting, *self.running)
            if rid is None or r.rid == rid or r.rid.startswith(rid + "_")
        ]
        reason = {"type": "abort", "message": message, "status_code": None, "err_type": None}
        for request in hit:
            if request.extent is None:
                self.waiting.remove(request)
            else:
                self.running.remove(request)
            self._end(request, dict(reason))
        return len(hit)

    def retract_all(self) -> int:
        """Put every running request back to the head of the queue; its cache is dropped."""
        for request in reversed(self.running):
            if request.extent is not None:
                self.pool.release(request.extent)
            request.extent, request.computed = None, 0
            request.input_logprobs.clear()
            request.retractions += 1
            self.waiting.appendleft(request)
        count = len(self.running)
        self.running = []
        return count

    def flush(self) -> None:
        """Forget the prefixes of finished sequences; running ones are not shared any more."""
        self.epoch += 1
        for kept in self.kept:
            self.pool.release(kept.extent)
        self.kept = []

    def step(self) -> None:
        """Admit what fits, run the model once over all that is due, sample, end what is done."""
        self._admit()
        if not self.running:
            return
        # Decoded tokens first: `Decoder.forward` wants single tokens before longer segments.
        due = [r for r in self.running if r.length - r.computed == 1]
        segments = [Segment(r.extent, r.computed, 1) for r in due if r.extent is not None]
        budget = STEP_TOKENS
        for request in self.running:
            count = min(request.length - request.computed, budget)
            if request.length - request.computed > 1 and request.extent is not None and count:
                # A chunk of one token would have to stand among the decoded ones.
                if count == 1:
                    break
                due.append(request)
                segments.append(Segment(request.extent, request.computed, count))
                budget -= count
        ids = [r.tokens[s.start : s.start + s.count] for r, s in zip(due, segments, strict=True)]
        tokens = torch.from_numpy(np.concatenate(ids))
        whole = any(
            r.logprob_start >= 0 and s.count > 1 for r, s in zip(due, segments, strict=True)
        )
        hidden = self.decoder.forward(tokens, segments, last_only=not whole)
        if whole:
            self._input_logprobs(hidden, due, segments)
            hidden = hidden[torch.tensor([s.count for s in segments]).cumsum(0) - 1]
        self._sample(hidden, due, segments)

    # -- admission -----------------------------------------------------------------------------

    def _admit(self) -> None:
        fresh = sum(r.length - r.computed for r in self.running if r.length - r.computed > 1)
        while self.waiting and len(self.running) < self.max_running and fresh < STEP_TOKENS:
            request = self.waiting[0]
            donor, shared = self._best_prefix(request)
            if isinstance(donor, Request) and donor.computed < shared:
                # Its prompt is being computed right now: worth a step's wait.
                return
            if not self._place(request, donor, shared):
                return
            self.waiting.popleft()
            self.running.append(request)
            request.epoch = self.epoch
            fresh += request.length - request.computed

    def _best_prefix(self, request: Request) -> tuple[Kept | Request | None, int]:
        """The sequence whose cache shares the longest prefix with a request, and its length."""
        ceiling = request.length - 1
        if request.logprob_start >= 0:
            ceiling = min(ceiling, request.logprob_start)
        if ceiling < MIN_SHARED:
            return None, 0
        ids = request.tokens[:ceiling]
        best: Kept | Request | None = None
        longest = MIN_SHARED - 1
        for kept in self.kept:
            shared = shared_prefix(ids, kept.tokens, longest)
            if shared > longest:
                best, longest = kept, shared
        for other in self.running:
            if other.epoch != self.epoch:
                continue
            tokens = other.tokens[: max(other.computed, len(other.input_ids))]
            shared = shared_prefix(ids, tokens, longest)
            if shared > longest:
                best, longest = other, shared
        return best, longest if best is not None else 0

    def _place(self, request: Request, donor: Kept | Request | None, shared: int) -> bool:
        """Give a request its extent, with the donor's prefix in it; False when there is no room."""
        need = len(request.tokens)
        if isinstance(donor, Kept) and shared >= len(donor.tokens) - 1:
            size = donor.extent.size
            if self.pool.resize(donor.extent, max(need, size)):
                self.kept.remove(donor)
                self.pool.resize(donor.extent, need)
                self._set_prefix(request, donor.extent, shared)
                return True
        extent = self.pool.allocate(need)
        while extent is None:
            victim = next((kept for kept in self.kept if kept is not donor), None)
            if victim is None:
                break
            self._drop(victim)
            extent = self.pool.allocate(need)
        if extent is None and isinstance(donor, Kept):
            self._drop(donor)
            donor, shared = None, 0
            extent = self.pool.allocate(need)
        if extent is None:
            return False
        if donor is not None and donor.extent is not None:
            self.pool.copy(donor.extent, extent, shared)
            if isinstance(donor, Kept):
                self.kept.remove(donor)
                if shared >= len(donor.tokens) - 1:
                    self.pool.release(donor.extent)
                else:
                    self.kept.append(donor)
        self._set_prefix(request, extent, shared)
        return True

    @staticmethod
    def _set_prefix(request: Request, extent: Extent, shared: int) -> None:
        request.extent = extent
        request.computed = shared
        request.cached = min(shared, len(request.input_ids))

    def _drop(self, kept: Kept) -> None:
        self.kept.remove(kept)
        self.pool.release(kept.extent)

    # -- the step ------------------------------------------------------------------------------

    def _input_logprobs(
        self, hidden: torch.Tensor, due: list[Request], segments: list[Segment]
    ) -> None:
        """Log-probabilities of prompt tokens, for the requests that asked for them."""
        offset = 0
        for request, segment in zip(due, segments, strict=True):
            rows, offset = offset, offset + segment.count
            if request.logprob_start < 0 or segment.start >= len(request.input_ids) - 1:
                continue
            first = max(segment.start, request.logprob_start)
            last = min(segment.start + segment.count, len(request.input_ids) - 1)
            if first >= last:
                continue
            part = hidden[rows + first - segment.start : rows + last - segment.start]
            temperature = request.params.temperature or 1.0
            logprobs = torch.log_softmax(self.decoder.logits(part) / temperature, -1)
            targets = torch.from_numpy(request.tokens[first + 1 : last + 1]).unsqueeze(1)
            request.input_logprobs.extend(logprobs.gather(1, targets).squeeze(1).tolist())

    def _sample(self, hidden: torch.Tensor, due: list[Request], segments: list[Segment]) -> None:
        """Next token of every sequence that is computed to its end; `hidden` has a row for each."""
        rows: list[int] = []
        for index, (request, segment) in enumerate(zip(due, segments, strict=True)):
            request.computed = segment.start + segment.count
            if request.computed == request.length:
                rows.append(index)
        if not rows:
            return
        if len(rows) < len(due):
            hidden = hidden[rows]
        ready = [due[index] for index in rows]
        logits = self.decoder.logits(hidden)
        tokens, logprobs = self.sampler.draw(
            logits, [r.params for r in ready], [len(r.output_ids) for r in ready]
        )
        ended = False
        for request, token, logprob in zip(ready, tokens, logprobs, strict=True):
            request.append(token, logprob, self.version)
            reason = self._stop_reason(request, token)
            if reason is not None:
                ended = True
                self._end(request, reason)
            elif request.stream and (
                (len(request.output_ids) - 1) % request.params.stream_interval == 0
            ):
                request.notify(request)
        if ended:
            self.running = [r for r in self.running if r.finish is None]

    def _stop_reason(self, request: Request, token: int) -> dict[str, Any] | None:
        params = request.params
        if token in params.stop_token_ids or (token in self.eos and not params.ignore_eos):
            return {"type": "stop", "matched": token}
        if params.stop:
            matched = self.codec.matched_stop(request.output_ids, params)
            if matched is not None:
                return {"type": "stop", "matched": matched}
        if len(request.output_ids) >= request.limit:
            return {"type": "length", "length": len(request.output_ids)}
        return None

    def _end(self, request: Request, reason: dict[str, Any]) -> None:
        """End a request; its computed prefix is kept for later requests to share."""
        request.finish = reason
        request.finished = time.perf_counter()
        extent, request.extent = request.extent, None
        if extent is not None:
            self._note_experts(request, extent)
            if request.epoch == self.epoch and request.computed >= MIN_SHARED:
                self.pool.resize(extent, request.computed)
                self.kept.append(Kept(request.tokens[: request.computed].copy(), extent))
                if len(self.kept) > KEPT_PER_SLOT * self.max_running:
                    self._drop(self.kept[0])
            else:
                self.pool.release(extent)
        self.finished(request)
        request.notify(request)

    def _note_experts(self, request: Request, extent: Extent) -> None:
        """The experts of the tokens that were computed, for a request that asked for them."""
        if request.experts_start is None or self.pool.experts is None:
            return
        first, last = extent.start + request.experts_start, extent.start + request.computed
        request.experts = self.pool.experts[first : max(first, last)].numpy().tobytes()
