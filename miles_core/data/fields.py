"""Checking a whole line of JSON while decoding only the fields that a conversion looks at."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import simdjson

_OPEN = ord("{")
_LONGEST = 4 << 20  # bytes; the parser keeps room for several times its longest line


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
        keys = list(fields)
        if len(set(keys)) != len(keys):
            return None
        return {key: _plain(fields[key]) for key in keys if key in self._wanted}


def _plain(value: Any) -> Any:
    if isinstance(value, simdjson.Object):
        return value.as_dict()
    return value.as_list() if isinstance(value, simdjson.Array) else value
