"""What terminus-2 makes of an answer that is no list of keys: a mistake that the policy is told."""

from __future__ import annotations

import math
from typing import Any

NO_KEYS = "keystrokes hold a NUL or half a surrogate pair, or a duration is no number"


class AnyAnswerParser:
    """One of Harbor's parsers of terminus-2, for whatever a policy may write.

    The parser itself raises for JSON that is nested too deep or has a number of too many digits,
    and the terminal for keys that no program can be given.
    """

    def __init__(self, parser: Any) -> None:
        self._parser = parser

    def parse_response(self, response: str) -> Any:
        """Harbor's ParseResult of an answer; its `error` says what is wrong."""
        try:
            result = self._parser.parse_response(response)
        except (ValueError, RecursionError) as error:
            return self._mistake(f"the answer cannot be read: {error}")
        if not all(_can_be_typed(command) for command in result.commands):
            return self._mistake(NO_KEYS)
        return result

    def _mistake(self, words: str) -> Any:
        result = self._parser.parse_response("")
        result.error = words[:300]
        return result


def _can_be_typed(command: Any) -> bool:
    """Whether a terminal takes these keys, and the time to wait after them is a number."""
    keys = command.keystrokes
    surrogates = any("\ud800" <= key <= "\udfff" for key in keys)
    return not surrogates and "\0" not in keys and not math.isnan(command.duration)
