"""Reading calls that are JSON inside of an answer, in time linear in its length."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from miles_core.sessions.messages import ToolCall


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is out of range")
    return value


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite)


def skip_space(text: str, at: int) -> int:
    """The position of the first character from `at` on that is no white space of JSON."""
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def read_json(text: str, at: int) -> tuple[Any, int] | None:
    """The JSON value at `text[at:]` and where it ends; None when it is none.

    A value that has no UTF-8 form (lone surrogates) or no JSON form (an infinity) is none.
    """
    try:
        value, end = _DECODER.raw_decode(text, skip_space(text, at))
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return value, end


def read_call(
    text: str, at: int, arguments: Sequence[str] = ("arguments",)
) -> tuple[ToolCall, int] | None:
    """The call `{"name": ..., "arguments": {...}}` at `text[at:]` and where it ends.

    `arguments` are the keys under which its arguments may stand. None when it is malformed.
    """
    read = read_json(text, at)
    if read is None:
        return None
    value, end = read
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    for key in arguments:
        if isinstance(value.get(key), dict):
            return ToolCall(value["name"], value[key]), end
    return None


def safe_length(text: str, mark: str) -> int:
    """How much of `text` stands before `mark`, or before what may yet become `mark`."""
    at = text.find(mark)
    if at >= 0:
        return at
    for size in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:size]):
            return len(text) - size
    return len(text)


def call_json(name: str, arguments: str, key: str = "arguments") -> str:
    """A call as one JSON object; `arguments` are JSON text."""
    return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": {arguments}}}'
