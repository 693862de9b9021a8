"""JSON as agents send it: strict and fast first, then whatever Python itself would accept."""

from __future__ import annotations

import json
from typing import Any

import orjson

from miles_core.sessions.messages import clean_text


def read_json(body: bytes) -> Any:
    """The value of a request's body; raises ValueError for what is no JSON.

    Clients in Python escape half a surrogate pair when a program printed one, which strict
    parsers refuse: it becomes U+FFFD.
    """
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        try:
            value = _clean(json.loads(body))
        except RecursionError as error:
            raise ValueError("nested too deep") from error
    return value


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, list):
        return [_clean(item) for item in value]
    if isinstance(value, dict):
        return {clean_text(key): _clean(item) for key, item in value.items()}
    return value
