"""OpenAI's chat completion format: what of a request counts, and how answers look."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from miles_core.sessions.families.family import openai_message
from miles_core.sessions.messages import Message, MessageError, parse_messages

# How our names differ from the engine's.
_PINNED_NAMES = {"max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens"}
_AGENT_PARAMS = ("temperature", "top_p")


class ApiError(Exception):
    """An error that the agent sees in OpenAI's shape."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


@dataclass(frozen=True)
class ChatRequest:
    """The parts of a chat request that a session honours; other fields are let pass."""

    model: str
    messages: list[Message]
    tools: list[dict[str, Any]]
    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    stream: bool
    include_usage: bool


def _number(body: dict[str, Any], name: str) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise ApiError(400, "invalid_value", f"{name} must be a number from 0 on", name)
    return value


def parse_request(body: Any) -> ChatRequest:
    """Read a request body; raises `ApiError` for what cannot be honoured."""
    if not isinstance(body, dict):
        raise ApiError(400, "invalid_value", "the body must be a JSON object")
    try:
        messages = parse_messages(body.get("messages"))
    except MessageError as error:
        raise ApiError(400, "invalid_value", str(error), "messages") from error
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ApiError(400, "invalid_value", "tools must be a list of objects", "tools")
    if body.get("tool_choice") == "none":
        tools = []
    if body.get("n") not in (None, 1):
        raise ApiError(400, "unsupported_value", "a session samples one answer (n=1)", "n")
    if body.get("stop"):
        raise ApiError(400, "unsupported_value", "a session has the model's own stops", "stop")
    limits = [_number(body, name) for name in ("max_tokens", "max_completion_tokens")]
    given = [int(limit) for limit in limits if limit is not None]
    if any(limit < 1 for limit in given):
        raise ApiError(400, "invalid_value", "max_tokens must be at least 1", "max_tokens")
    options = body.get("stream_options")
    return ChatRequest(
        model=str(body.get("model") or "policy"),
        messages=messages,
        tools=tools,
        max_tokens=min(given) if given else None,
        temperature=_number(body, "temperature"),
        top_p=_number(body, "top_p"),
        stream=bool(body.get("stream")),
        include_usage=isinstance(options, dict) and bool(options.get("include_usage")),
    )


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
    for name in _AGENT_PARAMS:
        value = getattr(request, name)
        if name not in params and value is not None:
            params[name] = value
    if request.max_tokens is not None:
        limits.append(request.max_tokens)
    params["max_new_tokens"] = min(limits)
    params["stop_token_ids"] = list(stop_ids)
    params["skip_special_tokens"] = False
    params["no_stop_trim"] = True
    return params


def completion(
    request: ChatRequest, rid: str, answer: Message, finish_reason: str, usage: tuple[int, int]
) -> dict[str, Any]:
    """A chat completion. `usage` counts the ids of prompt and answer."""
    if answer.tool_calls and finish_reason == "stop":
        finish_reason = "tool_calls"
    return {
        "id": f"chatcmpl-{rid}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": request.model,
        "choices": [
            {
                "index": 0,
                "message": openai_message(answer, f"call_{rid}"),
                "finish_reason": finish_reason,
                "logprobs": None,
            }
        ],
        "usage": {
            "prompt_tokens": usage[0],
            "completion_tokens": usage[1],
            "total_tokens": sum(usage),
        },
    }


def stream_events(whole: dict[str, Any], include_usage: bool) -> Iterator[bytes]:
    """A finished completion as server-sent events, the way that OpenAI streams one."""
    choice = whole["choices"][0]
    message = choice["message"]
    base = {key: whole[key] for key in ("id", "created", "model")}
    base["object"] = "chat.completion.chunk"

    def event(delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
        choices = [{"index": 0, "delta": delta, "finish_reason": finish_reason}]
        return _event({**base, "choices": choices})

    yield event({"role": "assistant", "content": ""})
    if message.get("reasoning_content"):
        yield event({"reasoning_content": message["reasoning_content"]})
    if message.get("content"):
        yield event({"content": message["content"]})
    for index, call in enumerate(message.get("tool_calls") or []):
        yield event({"tool_calls": [{"index": index, **call}]})
    yield event({}, choice["finish_reason"])
    if include_usage:
        yield _event({**base, "choices": [], "usage": whole["usage"]})
    yield b"data: [DONE]\n\n"


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"
