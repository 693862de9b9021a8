"""What an engine's answer must hold; anything that is not exact is a failure of the engine."""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson


class EngineFailure(Exception):
    """The engine gave no usable answer. `status` is what the agent's call answers: 502 or 503."""

    def __init__(self, message: str, status: int = 502) -> None:
        super().__init__(message)
        self.status = status


class ContextRefused(Exception):
    """The engine itself says that the prompt does not fit into its context."""


@dataclass(frozen=True)
class WantedExperts:
    """Rows of routed experts from token `first` on; `row` bytes each, 0 while `first` is 0."""

    first: int
    row: int


@dataclass(frozen=True)
class Generation:
    """What was sampled: ids (int32), the log-probability of each (float64), under which weights.

    `versions` are (weight version, start, end) over `output_ids`, without gaps. `experts` are the
    rows of routed experts from the token on that was asked for, `experts_row` bytes each.
    """

    output_ids: np.ndarray
    logprobs: np.ndarray
    versions: tuple[tuple[int, int, int], ...]
    finish_reason: str
    experts: bytes = b""
    experts_row: int = 0


def read_generation(
    answer: Any, max_new_tokens: int, prompt_tokens: int = 0, wanted: WantedExperts | None = None
) -> Generation:
    """Check an answer of `/generate`. Raises `EngineFailure`."""
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    if not isinstance(meta, dict):
        raise EngineFailure("the engine's answer has no meta_info")
    reason = meta.get("finish_reason")
    kind = reason.get("type") if isinstance(reason, dict) else reason
    if kind == "abort":
        message = reason.get("message") if isinstance(reason, dict) else ""
        raise EngineFailure(f"the generation was aborted: {_shown(message)}", 503)
    if kind not in ("stop", "length"):
        raise EngineFailure(f"the engine ended with an unknown finish_reason {_shown(reason)}")
    ids, logprobs = _tokens(answer, meta, max_new_tokens)
    experts, row = b"", 0
    if wanted is not None:
        experts, row = _experts(meta, prompt_tokens + len(ids) - 1, wanted)
    return Generation(ids, logprobs, _versions(meta, len(ids)), kind, experts, row)


def ids_so_far(event: bytes) -> list[int]:
    """The ids in an event of an engine's stream. Raises `EngineFailure`."""
    try:
        ids = orjson.loads(event)["output_ids"]
        if all(type(token) is int and 0 <= token < 2**31 for token in ids):
            return list(ids)
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise EngineFailure(f"the engine streams {event[:200]!r}") from error
    raise EngineFailure("the engine streams ids that are no ids")


def _tokens(
    answer: dict[str, Any], meta: dict[str, Any], max_new_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    try:
        entries = meta["output_token_logprobs"]
        listed = [entry[1] for entry in entries]
        if not all(type(token) is int and 0 <= token < 2**31 for token in listed):
            raise ValueError("ids must be integers")
        ids = np.array(listed, np.int32)
        logprobs = np.array([entry[0] for entry in entries], np.float64)
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise EngineFailure("the engine's answer has no usable output_token_logprobs") from error
    if not 0 < len(ids) <= max_new_tokens:
        raise EngineFailure(f"the engine sampled {len(ids)} tokens of at most {max_new_tokens}")
    given = answer.get("output_ids")
    if given is not None and given != listed:
        raise EngineFailure("output_ids and output_token_logprobs disagree")
    counted = meta.get("completion_tokens", len(ids))
    if counted != len(ids):
        raise EngineFailure(
            f"the engine gave {len(ids)} of the {_shown(counted)} tokens that it sampled"
        )
    if logprobs.ndim != 1 or not np.isfinite(logprobs).all() or (logprobs > 1e-3).any():
        raise EngineFailure("the engine's log-probabilities are not finite or positive")
    return ids, logprobs


def _versions(meta: dict[str, Any], count: int) -> tuple[tuple[int, int, int], ...]:
    """The weight versions over the output; engines without `weight_versions` have one."""
    spans = meta.get("weight_versions")
    if not spans:
        return ((_version(meta.get("weight_version")), 0, count),)
    try:
        found = tuple((_version(s["version"]), s["start"], s["end"]) for s in spans)
        if not all(type(at) is int for _, *ends in found for at in ends):
            raise ValueError("positions must be whole numbers")
    except (KeyError, TypeError, ValueError) as error:
        raise EngineFailure(f"weight_versions is {_shown(spans)}") from error
    ends = [0, *(end for _, _, end in found)]
    whole = ends[-1] == count and all(start < end for _, start, end in found)
    if not whole or [start for _, start, _ in found] != ends[:-1]:
        raise EngineFailure(f"weight_versions {found} do not cover {count} tokens")
    return found


def _version(value: Any) -> int:
    """The integer version; an SGLang engine whose weights were never pushed says `default`."""
    if value == "default":
        return 0
    if isinstance(value, str) and re.fullmatch("[0-9]{1,18}", value):
        return int(value)
    if type(value) is int and 0 <= value < 10**18:
        return value
    raise EngineFailure(f"weight_version is {_shown(value)}, not a whole number")


def _shown(value: Any) -> str:
    """A value of an engine's answer, for a message to a person."""
    try:
        return repr(value)[:200]
    except RecursionError:
        return "nested without end"


def _experts(meta: dict[str, Any], rows: int, wanted: WantedExperts) -> tuple[bytes, int]:
    """The wanted ones of `rows` rows, and the bytes of one.

    An engine that does not know `routed_experts_start_len` answers with all rows.
    """
    value = meta.get("routed_experts")
    if not isinstance(value, str):
        raise EngineFailure("the engine's answer has no routed_experts")
    try:
        data = base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise EngineFailure("routed_experts is no base64") from error
    row = wanted.row or len(data) // rows
    missing = rows - wanted.first
    if row and len(data) in (row * missing, row * rows):
        return data[len(data) - row * missing :], row
    raise EngineFailure(f"routed_experts has {len(data)} bytes for {missing} of {rows} tokens")
