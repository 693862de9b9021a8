"""What the answers of a model endpoint mean to an agent, wherever that runs."""

from __future__ import annotations

import json
from typing import Any

RETRIED_STATUS = frozenset({429, 502, 503, 504})
POLICY_LIMITS = {"context_length_exceeded": "token_budget", "turn_limit": "turn_limit"}
"""The codes of a status 400 that end an agent by its own doing, and the causes they stand for."""
ATTEMPTS = 4
TIMEOUT_S = 3600.0
"""The most seconds that one model call may take."""
ANSWER_LIMIT = 16 << 20
"""Bytes of one answer; a longer one is not read to its end."""
TOO_LONG = f"an answer of more than {ANSWER_LIMIT >> 20} MiB"


class NoCompletion(ValueError):
    """An answer of status 200 that is no chat completion; `cause` names a verdict's cause."""

    def __init__(self, message: str, cause: str = "session_failed") -> None:
        super().__init__(message)
        self.cause = cause


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


def completion(body: bytes) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """A chat completion of OpenAI's form, its first choice, and the message of that.

    The message has text or null as `content`, a list of calls of functions or null as
    `tool_calls`, and the role `assistant`. What the policy wrote into these is its own matter:
    arguments need not be JSON. Raises NoCompletion, which says what is not as it must be.
    """
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise NoCompletion(f"an answer that is not JSON: {error}"[:400]) from error
    if isinstance(answer, dict) and answer.get("error") and not answer.get("choices"):
        cause, said = refusal(200, json.dumps(answer))
        raise NoCompletion(said, cause or "session_failed")
    choices = _object(answer, "the answer").get("choices")
    if not isinstance(choices, list) or not choices:
        raise NoCompletion("no completion: the answer has no choices")
    choice = _object(choices[0], "choices[0]")
    message = {"role": "assistant", **_object(choice.get("message"), "message")}
    if message["role"] != "assistant":
        raise NoCompletion(f"no completion: message.role is {message['role']!r:.100}")
    _check_texts(message, "message", "content", "reasoning_content")
    _check_texts(answer, "the answer", "model")
    _check_calls(message.get("tool_calls"))
    _check_usage(answer.get("usage"))
    return answer, choice, message


def _object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise NoCompletion(f"no completion: {name} is no object but {_kind(value)}")
    return value


def _check_texts(values: dict[str, Any], name: str, *keys: str) -> None:
    for key in keys:
        if not isinstance(values.get(key), str | None):
            kind = _kind(values[key])
            raise NoCompletion(f"no completion: {name}.{key} is no text but {kind}")


def _check_calls(calls: Any) -> None:
    if not isinstance(calls, list | None):
        raise NoCompletion(f"no completion: message.tool_calls is no list but {_kind(calls)}")
    for number, call in enumerate(calls or []):
        name = f"tool_calls[{number}]"
        _check_texts(_object(call, name), name, "id")
        function = _object(call.get("function"), f"{name}.function")
        _check_texts(function, f"{name}.function", "name", "arguments")


def _check_usage(usage: Any) -> None:
    if usage is None:
        return
    for key in ("prompt_tokens", "completion_tokens"):
        count = _object(usage, "usage").get(key)
        if count is not None and (type(count) is not int or not 0 <= count < 2**53):
            raise NoCompletion(f"no completion: usage.{key} is no count but {_kind(count)}")


def _kind(value: Any) -> str:
    """A value for a person: the sort of it, and its beginning."""
    return "null" if value is None else f"{type(value).__name__} {value!r:.60}"


def _problem(text: str) -> tuple[str, str]:
    """Code and message of an OpenAI-style error body."""
    try:
        error = json.loads(text)["error"]
        return str(error.get("code") or error.get("type") or ""), str(error.get("message", ""))
    except (ValueError, KeyError, TypeError, AttributeError):
        return "", text[:300]
