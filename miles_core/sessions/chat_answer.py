"""How answers look in OpenAI's chat completion format, whole and as a stream."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import orjson

from miles_core.sessions.chat_request import ChatRequest
from miles_core.sessions.errors import ApiError
from miles_core.sessions.families import openai_message
from miles_core.sessions.messages import Message

DONE = b"data: [DONE]\n\n"


def completion(
    request: ChatRequest,
    rid: str,
    answer: Message,
    finish_reason: str,
    usage: tuple[int, int],
    logprobs: list[dict[str, Any]] | None,
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
                "logprobs": None if logprobs is None else {"content": logprobs},
            }
        ],
        "usage": {
            "prompt_tokens": usage[0],
            "completion_tokens": usage[1],
            "total_tokens": sum(usage),
        },
    }


class StreamedAnswer:
    """The server-sent events of one answer: what is settled first, then the rest of it."""

    def __init__(self, request: ChatRequest, rid: str) -> None:
        self._request = request
        self._base = {
            "id": f"chatcmpl-{rid}",
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": request.model,
        }
        self._sent = {"reasoning_content": 0, "content": 0}

    def start(self) -> bytes:
        return self._event({"role": "assistant", "content": ""})

    def settled(self, reasoning: str, content: str) -> Iterator[bytes]:
        """Events for what has been added since the last time."""
        for name, text in (("reasoning_content", reasoning), ("content", content)):
            more = text[self._sent[name] :]
            if more:
                self._sent[name] += len(more)
                yield self._event({name: more})

    def end(self, whole: dict[str, Any]) -> Iterator[bytes]:
        """The rest of a completion, why it ended, and what it cost."""
        choice = whole["choices"][0]
        message = choice["message"]
        yield from self.settled(
            message.get("reasoning_content") or "", message.get("content") or ""
        )
        for index, call in enumerate(message.get("tool_calls") or []):
            yield self._event({"tool_calls": [{"index": index, **call}]})
        yield self._event({}, choice["finish_reason"], choice["logprobs"])
        if self._request.include_usage:
            yield _data({**self._base, "choices": [], "usage": whole["usage"]})
        yield DONE

    def failure(self, error: ApiError) -> bytes:
        """An answer that broke off after it had begun; no `[DONE]` follows."""
        return _data(error.body())

    def _event(
        self,
        delta: dict[str, Any],
        finish_reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> bytes:
        choice = {
            "index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": logprobs
        }  # fmt: skip
        return _data({**self._base, "choices": [choice]})


def _data(value: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"
