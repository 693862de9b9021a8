"""Sampling parameters, and drawing the next token of every row of a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

# SGLang parameters that the embedded engine does not implement: accepted at their neutral value.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1, None),
    "min_new_tokens": (0, None),
    "frequency_penalty": (0, None),
    "presence_penalty": (0, None),
    "repetition_penalty": (1, None),
    "stop_regex": (None, [], ""),
    "logit_bias": (None, {}),
    "json_schema": (None,),
    "regex": (None,),
    "ebnf": (None,),
    "structural_tag": (None,),
    "custom_params": (None, {}),
    "spaces_between_special_tokens": (True, None),
}

# As in SGLang; logits divided by less could overflow.
GREEDY_BELOW = 1e-6


class RequestError(ValueError):
    """A request that cannot be served as asked; answered with status 400."""


@dataclass(frozen=True)
class SamplingParams:
    """One request's sampling, with SGLang's names and defaults; temperature 0 is greedy.

    `parse_sampling` takes a temperature below GREEDY_BELOW as 0. A stream has an event for the
    first token, then for each `stream_interval` more, and for the last.
    """

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    sampling_seed: int | None = None
    stream_interval: int = 1


def _number(name: str, value: Any, low: float, high: float, whole: bool = False) -> Any:
    good = isinstance(value, int) or (isinstance(value, float) and not whole)
    if isinstance(value, bool) or not good or not low <= value <= high:
        kind = "an integer" if whole else "a number"
        raise RequestError(
            f"sampling_params.{name} must be {kind} from {low:g} to {high:g}, not {value!r}"
        )
    return value


def _temperature(name: str, value: Any) -> float:
    value = float(_number(name, value, 0, 1e6))
    return value if value >= GREEDY_BELOW else 0.0


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise RequestError(f"sampling_params.{name} must be true or false, not {value!r}")
    return value


def _strings(name: str, value: Any) -> tuple[str, ...]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, str) and item for item in items):
        raise RequestError(f"sampling_params.{name} must be a string or a list of strings")
    return tuple(items)


def _ids(name: str, value: Any) -> frozenset[int]:
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise RequestError(f"sampling_params.{name} must be a list of integers")
    return frozenset(value)


_PARSERS: dict[str, Any] = {
    "max_new_tokens": lambda n, v: _number(n, v, 0, 2**31, whole=True),
    "temperature": _temperature,
    "top_p": lambda n, v: float(_number(n, v, 1e-9, 1)),
    "top_k": lambda n, v: _number(n, v, -1, 2**31, whole=True),
    "min_p": lambda n, v: float(_number(n, v, 0, 1)),
    "stop": _strings,
    "stop_token_ids": _ids,
    "ignore_eos": _flag,
    "no_stop_trim": _flag,
    "skip_special_tokens": _flag,
    "sampling_seed": lambda n, v: _number(n, v, -(2**63), 2**63 - 1, whole=True),
    "stream_interval": lambda n, v: _number(n, v, 1, 2**31, whole=True),
}


def parse_sampling(raw: Any) -> SamplingParams:
    """Parameters of a request's `sampling_params` object.

    Raises:
        RequestError: a name is unknown, or a value is out of range or not implemented.
    """
    if raw is None:
        return SamplingParams()
    if not isinstance(raw, dict):
        raise RequestError("sampling_params must be an object")
    values: dict[str, Any] = {}
    for name, value in raw.items():
        if name in NEUTRAL:
            if value not in NEUTRAL[name]:
                raise RequestError(f"sampling_params.{name} is not supported by this engine")
        elif name not in _PARSERS:
            raise RequestError(f"sampling_params.{name} is unknown")
        elif value is not None:
            values[name] = _PARSERS[name](name, value)
    return SamplingParams(**values)


class Sampler:
    """Draws tokens by inversion: the first whose cumulative probability exceeds a uniform number.

    A row with a `sampling_seed` takes its number from that seed and the position alone, so that
    it does not depend on what else is in the batch.
    """

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.seeded = torch.Generator()

    def draw(
        self, logits: torch.Tensor, params: list[SamplingParams], positions: list[int]
    ) -> tuple[list[int], list[float]]:
        """Token and its log-probability for each row of `logits` [rows, vocab].

        The log-probability is that of softmax(logits / temperature), before top-p, top-k and min-p
        restrict it; for a greedy row, that of softmax(logits).
        """
        temperatures = [p.temperature or 1.0 for p in params]
        if any(t != 1.0 for t in temperatures):
            logits = logits / torch.tensor(temperatures).unsqueeze(1)
        logprobs = torch.log_softmax(logits, -1)
        if all(p.temperature == 0 for p in params):
            tokens = logprobs.argmax(-1, keepdim=True)
        else:
            tokens = self._invert(logprobs, params, positions)
        return tokens.squeeze(1).tolist(), logprobs.gather(1, tokens).squeeze(1).tolist()

    def _invert(
        self, logprobs: torch.Tensor, params: list[SamplingParams], positions: list[int]
    ) -> torch.Tensor:
        """Drawn tokens [rows, 1]."""
        probs = logprobs.exp()
        for i, p in enumerate(params):
            if p.temperature == 0:
                likeliest = logprobs[i].argmax()
                probs[i] = 0
                probs[i, likeliest] = 1
            elif p.top_p < 1 or p.top_k > 0 or p.min_p > 0:
                probs[i].masked_fill_(~_allowed(logprobs[i], p), 0)
        # In float64 a vocabulary of any size adds up to far below the resolution of a float32.
        cumulative = probs.cumsum(-1, dtype=torch.float64)
        total = cumulative[:, -1:]
        wanted = self._uniform(params, positions) * total
        # A number that was rounded up to the total would fall behind the last token.
        wanted = torch.minimum(wanted, torch.nextafter(total, torch.zeros_like(total)))
        tokens = torch.searchsorted(cumulative, wanted, right=True)
        # Logits that are not a number have no such token; their log-probability tells.
        return tokens.clamp_(max=logprobs.shape[1] - 1)

    def _uniform(self, params: list[SamplingParams], positions: list[int]) -> torch.Tensor:
        """A number from [0, 1) for each row, [rows, 1] in float64."""
        uniform = torch.rand(len(params), 1, generator=self.generator, dtype=torch.float64)
        for i, p in enumerate(params):
            if p.sampling_seed is not None:
                # Weyl step with the golden ratio: neighbouring seeds and positions lie far apart.
                mixed = (p.sampling_seed * 0x9E3779B97F4A7C15 + positions[i]) & (2**63 - 1)
                self.seeded.manual_seed(mixed)
                torch.rand(1, generator=self.seeded, out=uniform[i])
        return uniform


def _allowed(logprobs: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """[vocab], true for the tokens that top-k, top-p and min-p leave; never empty."""
    ordered, order = logprobs.sort(descending=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if params.top_k > 0:
        keep[params.top_k :] = False
    if params.min_p > 0:
        keep &= ordered.exp() >= params.min_p * ordered[0].exp()
    if params.top_p < 1:
        kept = (ordered.exp() * keep).double()
        kept /= kept.sum()
        keep &= (kept.cumsum(0) - kept) < params.top_p
    keep[0] = True
    allowed = torch.zeros_like(keep)
    allowed[order] = keep
    return allowed
