"""What of an OpenAI chat request counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from miles_core.sessions.errors import ApiError

_HONOURED = {"messages", "tools", "model", "n", "stop", "max_tokens", "max_completion_tokens",
             "temperature", "top_p", "stream", "stream_options", "logprobs",
             "tool_choice"}  # fmt: skip
# Fields that change nothing about the answer that a session gives.
_HARMLESS = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
             "prompt_cache_retention", "parallel_tool_calls", "top_logprobs"}  # fmt: skip
_MOST_STOPS, _LONGEST_STOP = 16, 1_000
_MOST_MESSAGES = 20_000
_MOST_TOOLS = 2_000
_MOST_TOKENS = 2**31 - 1


@dataclass(frozen=True)
class ChatRequest:
    """The parts of a chat request that a session honours.

    `messages` are as they came: what repeats recorded ones is not read again. `ignored` names the
    fields that ask for what no session can do. `size` counts the bytes of the whole body.
    """

    model: str
    messages: list[Any]
    tools: list[dict[str, Any]]
    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    stop: tuple[str, ...]
    logprobs: bool
    stream: bool
    include_usage: bool
    ignored: tuple[str, ...]
    size: int


def parse_request(body: Any, size: int) -> ChatRequest:
    """Read a request body; raises `ApiError` for what cannot be understood."""
    if not isinstance(body, dict):
        raise ApiError(400, "invalid_value", "the body must be a JSON object")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "invalid_value", "messages must be a non-empty list", "messages")
    if len(messages) > _MOST_MESSAGES:
        text = (
            f"{len(messages)} messages are more than the {_MOST_MESSAGES} that a request may have"
        )
        raise ApiError(400, "invalid_value", text, "messages")
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ApiError(400, "invalid_value", "tools must be a list of objects", "tools")
    if len(tools) > _MOST_TOOLS:
        text = f"{len(tools)} tools are more than the {_MOST_TOOLS} that a request may have"
        raise ApiError(400, "invalid_value", text, "tools")
    if body.get("n") not in (None, 1):
        raise ApiError(400, "unsupported_value", "a session samples one answer (n=1)", "n")
    choice = body.get("tool_choice")
    ignored = [name for name in body if name not in _HONOURED and name not in _HARMLESS]
    ignored = [name[:100] for name in ignored if body[name] not in (None, False, [], {}, "")]
    if choice not in (None, "auto", "none"):
        ignored.append("tool_choice")
    limits = [_limit(body, name) for name in ("max_tokens", "max_completion_tokens")]
    given = [limit for limit in limits if limit is not None]
    options = body.get("stream_options")
    model = body.get("model")
    return ChatRequest(
        model=model[:200] if isinstance(model, str) and model else "policy",
        messages=messages,
        tools=[] if choice == "none" else tools,
        max_tokens=min(given) if given else None,
        temperature=_number(body, "temperature", 0.0, 100.0),
        top_p=_number(body, "top_p", 1e-6, 1.0),
        stop=_stops(body),
        logprobs=body.get("logprobs") is True,
        stream=bool(body.get("stream")),
        include_usage=isinstance(options, dict) and bool(options.get("include_usage")),
        ignored=tuple(ignored),
        size=size,
    )


def _number(body: dict[str, Any], name: str, least: float, most: float) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    number = not isinstance(value, bool) and isinstance(value, int | float)
    if not number or not least <= value <= most:
        raise ApiError(
            400, "invalid_value", f"{name} must be a number from {least:g} to {most:g}", name
        )
    return float(value)


def _limit(body: dict[str, Any], name: str) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    number = not isinstance(value, bool) and isinstance(value, int | float)
    if not number or not 1 <= value <= _MOST_TOKENS or value != int(value):
        raise ApiError(400, "invalid_value", f"{name} must be a whole number from 1 on", name)
    return int(value)


def _stops(body: dict[str, Any]) -> tuple[str, ...]:
    value = body.get("stop")
    stops = [value] if isinstance(value, str) else value or []
    if (
        not isinstance(stops, list)
        or len(stops) > _MOST_STOPS
        or not all(isinstance(stop, str) and 0 < len(stop) <= _LONGEST_STOP for stop in stops)
    ):
        raise ApiError(
            400,
            "invalid_value",
            f"stop must be up to {_MOST_STOPS} texts of 1 to {_LONGEST_STOP} characters",
            "stop",
        )
    return tuple(stops)


# How our names differ from the engine's.
_PINNED_NAMES = {"max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens"}


def engine_sampling(
    request: ChatRequest, pinned: dict[str, Any], remaining: int, stop_ids: tuple[int, ...]
) -> dict[str, Any]:
    """The engine's sampling parameters: what is pinned holds; the agent may only ask for less.

    `remaining` is how many tokens the session's budget has left; at least 1.
    """
    params: dict[str, Any] = {}
    limits = [remaining]
    for name, value in pinned.items():
        name = _PINNED_NAMES.get(name, name)
        if name == "max_new_tokens":
            limits.append(int(value))
        else:
            params[name] = value
    for name, asked in (("temperature", request.temperature), ("top_p", request.top_p)):
        if name not in params and asked is not None:
            params[name] = asked
    if request.max_tokens is not None:
        limits.append(request.max_tokens)
    if request.stop:
        params["stop"] = [*request.stop]
    params["max_new_tokens"] = min(limits)
    params["stop_token_ids"] = list(stop_ids)
    params["skip_special_tokens"] = False
    params["no_stop_trim"] = True
    return params
