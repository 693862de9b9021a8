"""One generation: its tokens, its progress, and its answer in SGLang's shape."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from miles_core.engines.kv import Extent
from miles_core.engines.sampling import SamplingParams
from miles_core.engines.text import TextCodec


@dataclass(eq=False)
class Request:
    """A generation from its arrival to its end.

    `notify(request)` is called by the engine's thread when it has ended and, with `stream`, after
    each token. `computed` counts the leading tokens whose keys and values are in `extent`. Unless
    `experts_start` is None, `experts` are in the end the int32 [tokens, layers, k] experts of all
    tokens from there on, but the last, which is sampled and not computed.
    """

    rid: str
    input_ids: list[int]
    params: SamplingParams
    notify: Callable[[Request], None]
    return_logprob: bool = False
    logprob_start: int = -1
    stream: bool = False
    experts_start: int | None = None
    limit: int = 0
    arrived: float = field(default_factory=time.perf_counter)
    tokens: np.ndarray = field(init=False)
    length: int = field(init=False)
    output_ids: list[int] = field(default_factory=list)
    output_logprobs: list[float] = field(default_factory=list)
    input_logprobs: list[float] = field(default_factory=list)
    spans: list[list[Any]] = field(default_factory=list)
    extent: Extent | None = None
    computed: int = 0
    epoch: int = 0
    cached: int = 0
    retractions: int = 0
    experts: bytes = b""
    finish: dict[str, Any] | None = None
    finished: float = 0.0

    def __post_init__(self) -> None:
        self.length = len(self.input_ids)
        self.tokens = np.empty(self.length + self.limit, dtype=np.int64)
        self.tokens[: self.length] = self.input_ids

    def append(self, token: int, logprob: float, version: str) -> None:
        """Take a sampled token under the weight version that it was sampled with."""
        self.tokens[self.length] = token
        self.length += 1
        count = len(self.output_ids)
        self.output_ids.append(token)
        self.output_logprobs.append(logprob)
        if self.spans and self.spans[-1][0] == version:
            self.spans[-1][2] = count + 1
        else:
            self.spans.append([version, count, count + 1])

    def version(self, current: str) -> str:
        """The weight version of the last token, or of the engine when there is none."""
        return self.spans[-1][0] if self.spans else current

    def answer(self, codec: TextCodec, current: str) -> dict[str, Any]:
        """The response object of SGLang's `/generate`."""
        params = self.params
        meta: dict[str, Any] = {
            "id": self.rid,
            "finish_reason": self.finish,
            "prompt_tokens": len(self.input_ids),
            "completion_tokens": len(self.output_ids),
            "cached_tokens": self.cached,
            "num_retractions": self.retractions,
            "weight_version": self.version(current),
            "weight_versions": [
                {"version": version, "start": start, "end": end}
                for version, start, end in self.spans
            ],
            "e2e_latency": (self.finished or time.perf_counter()) - self.arrived,
        }
        if self.return_logprob:
            ids, probs = self.output_ids, self.output_logprobs
            entries = [[p, t, None] for p, t in zip(probs, ids, strict=False)]
            meta["output_token_logprobs"] = entries
            meta["output_token_logprobs_length"] = len(entries)
            meta["input_token_logprobs"] = self._input_entries()
        if self.experts_start is not None and self.finish is not None:
            meta["routed_experts"] = base64.b64encode(self.experts).decode()
        text = codec.text(self.output_ids, params, self.finish)
        return {"text": text, "output_ids": list(self.output_ids), "meta_info": meta}

    def _input_entries(self) -> list[list[Any]]:
        """`[logprob, id, null]` from `logprob_start` on; the first has no log-probability."""
        if self.logprob_start < 0:
            return []
        ids = self.input_ids[self.logprob_start :]
        first: list[list[Any]] = [[None, token, None] for token in ids[:1]]
        rest = zip(self.input_logprobs, ids[1:], strict=False)
        return first + [[logprob, token, None] for logprob, token in rest]
