"""What the answers of a model endpoint mean to an agent, wherever that runs."""

from __future__ import annotations

import json

RETRIED_STATUS = frozenset({429, 502, 503, 504})
POLICY_LIMITS = {"context_length_exceeded": "token_budget", "turn_limit": "turn_limit"}
"""The codes of a status 400 that end an agent by its own doing, and the causes they stand for."""
ATTEMPTS = 4
TIMEOUT_S = 3600.0
"""The most seconds that one model call may take."""


def pause_s(attempt: int) -> float:
    """Seconds to wait before attempt number `attempt`, from 0."""
    return min(8.0, 0.5 * 2**attempt) if attempt else 0.0


def refusal(status: int, text: str) -> tuple[str | None, str]:
    """The cause that an error status stands for, None for one to try again, and a summary."""
    code, message = _problem(text)
    summary = f"HTTP {status} {code}: {message}"[:400]
    if status == 400 and code in POLICY_LIMITS:
        return POLICY_LIMITS[code], message
    if code == "engine_failed":
        return "engine_failed", summary
    return (None if status in RETRIED_STATUS else "session_failed"), summary


def _problem(text: str) -> tuple[str, str]:
    """Code and message of an OpenAI-style error body."""
    try:
        error = json.loads(text)["error"]
        return str(error.get("code") or error.get("type") or ""), str(error.get("message", ""))
    except (ValueError, KeyError, TypeError, AttributeError):
        return "", text[:300]
