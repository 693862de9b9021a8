"""Checking a whole line of JSON while decoding only the fields that a conversion looks at."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import simdjson

_OPEN = ord("{")
_PLAIN = (str, int, float, type(None))
_SHAPES = 100  # remembered at most
_LONGEST = 1 << 20  # bytes; the parser keeps room for a dozen times its longest line


class FieldDecoder:
    """Decodes some top-level fields of a JSON object; checks the grammar and UTF-8 of all of it.

    `paths` are dotted paths; the fields that any of them can lead through are decoded.
    """

    def __init__(self, paths: Iterable[str]) -> None:
        self._wanted = frozenset(
            ".".join(parts[:end])
            for parts in (path.split(".") for path in paths)
            for end in range(1, len(parts) + 1)
        )
        self._parse = simdjson.Parser().parse
        self._shapes: dict[tuple[str, ...], tuple[str, ...] | None] = {}

    def decode(self, data: bytes) -> dict[str, Any] | None:
        """The wanted fields that the object has; None when the line must be decoded wholly.

        None does not mean that the line is bad: the decoder of whole rows has the last word. It
        is the answer for integers of more than 64 bits and for a key that comes twice, too.
        """
        if not data or data[0] != _OPEN or len(data) > _LONGEST:
            return None
        try:
            fields = self._parse(data)
        except (ValueError, RuntimeError):
            return None
        assert isinstance(fields, simdjson.Object), "the line begins with a brace"
        keys = tuple(fields)
        try:
            wanted = self._shapes[keys]
        except KeyError:
            wanted = self._new_shape(keys)
        if wanted is None:
            return None
        found = {}
        for key in wanted:
            value = fields[key]
            found[key] = value if isinstance(value, _PLAIN) else _unpacked(value)
        return found

    def _new_shape(self, keys: tuple[str, ...]) -> tuple[str, ...] | None:
        """Which of these keys are wanted, or None if one comes twice; most rows share a shape."""
        unique = len(set(keys)) == len(keys)
        wanted = tuple(key for key in keys if key in self._wanted) if unique else None
        if len(self._shapes) < _SHAPES:
            self._shapes[keys] = wanted
        return wanted


def _unpacked(value: Any) -> Any:
    return value.as_dict() if isinstance(value, simdjson.Object) else value.as_list()
