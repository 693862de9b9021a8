"""What may be shown of text that came out of a sandbox.

The page writes all text as text. Here secrets are taken out and what cannot be shown is replaced.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from miles_core.agent_server.hiding import is_secret_key

HIDDEN = "[hidden]"
TEXT_LIMIT = 20_000
"""Characters of one text of a trajectory; of a longer one the middle is left out."""

_SESSION = re.compile(r"(/sessions/)[A-Za-z0-9._~%*-]+")
_BEARER = re.compile(r"(?i)\b(bearer\s+)[A-Za-z0-9._~+/=-]{6,}")
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")


class Cleaner:
    """Takes secrets and control characters out of texts; `secrets` are known by value."""

    def __init__(self, secrets: Iterable[str | None] = ()) -> None:
        self._secrets = sorted((s for s in secrets if s and len(s) >= 6), key=len, reverse=True)

    def text(self, value: str) -> str:
        """One text without secrets, terminal escapes and control characters."""
        value = _ESCAPES.sub("", value.replace("\r\n", "\n"))
        value = _CONTROLS.sub("\ufffd", value)
        for secret in self._secrets:
            value = value.replace(secret, HIDDEN)
        value = _SESSION.sub(rf"\1{HIDDEN}", value)
        return _BEARER.sub(rf"\1{HIDDEN}", value)

    def short(self, value: str, limit: int = TEXT_LIMIT) -> str:
        """One text of about `limit` characters at most."""
        return middle_left_out(self.text(value), limit)

    def value(self, value: Any, depth: int = 8) -> Any:
        """A JSON value with every text cleaned and the values of secret keys hidden."""
        if isinstance(value, str):
            return self.short(value)
        if depth == 0 and isinstance(value, (dict, list)):
            return "..."
        if isinstance(value, dict):
            return {
                self.short(str(key), 200): HIDDEN
                if is_secret_key(str(key)) and isinstance(item, str)
                else self.value(item, depth - 1)
                for key, item in list(value.items())[:200]
            }
        if isinstance(value, list):
            return [self.value(item, depth - 1) for item in value[:200]]
        if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
            return str(value)
        return value


def middle_left_out(value: str, limit: int) -> str:
    """Start and end of a text longer than `limit`, and how much is missing between them."""
    if len(value) <= limit:
        return value
    head, tail = limit * 3 // 4, limit // 4
    missing = len(value) - head - tail
    return f"{value[:head]}\n[{missing} characters left out]\n{value[-tail:]}"
