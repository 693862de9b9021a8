"""The libraries `openai` and `litellm` as clients of an episode."""

from __future__ import annotations

from typing import Any

import litellm
import openai

IMPATIENT_S = 0.7


class OpenAIClient:
    """The library `openai`, which asks again by itself after 503 and after a timeout."""

    TimedOut = (openai.APITimeoutError,)

    def __init__(self, base_url: str) -> None:
        self.library = openai.OpenAI(base_url=base_url, api_key="none", timeout=30, max_retries=3)

    def ask(self, messages: list[Any], tools: list[Any], **more: Any) -> dict[str, Any]:
        answer = self.library.chat.completions.create(
            model="policy", messages=messages, tools=tools or openai.omit, **more
        )
        return answer.choices[0].message.model_dump()

    def ask_impatiently(self, messages: list[Any], tools: list[Any], retry: bool) -> Any:
        library = self.library.with_options(timeout=IMPATIENT_S, max_retries=3 * retry)
        answer = library.chat.completions.create(model="policy", messages=messages, tools=tools)
        return answer.choices[0].message.model_dump(exclude_none=True)

    def stream(self, messages: list[Any], tools: list[Any]) -> dict[str, Any]:
        asked = {"model": "policy", "messages": messages, "tools": tools}
        with self.library.chat.completions.stream(**asked) as events:
            for _ in events:
                pass
            return events.get_final_completion().choices[0].message.model_dump(exclude={"parsed"})

    def drop_stream(self, messages: list[Any], tools: list[Any]) -> None:
        chunks = self.library.chat.completions.create(
            model="policy", messages=messages, tools=tools, stream=True
        )
        next(iter(chunks))
        chunks.close()


class LitellmClient:
    """The library `litellm`, told to try three times."""

    TimedOut = (litellm.Timeout,)

    def __init__(self, base_url: str) -> None:
        self.asked: dict[str, Any] = {
            "model": "openai/policy",
            "api_base": base_url,
            "api_key": "none",
            "timeout": 30,
            "num_retries": 3,
        }

    def ask(self, messages: list[Any], tools: list[Any], **more: Any) -> dict[str, Any]:
        asked = {**self.asked, "messages": messages, "tools": tools or None, **more}
        return litellm.completion(**asked).choices[0].message.model_dump()

    def ask_impatiently(self, messages: list[Any], tools: list[Any], retry: bool) -> Any:
        more = {"timeout": IMPATIENT_S, "num_retries": 3 * retry, "max_retries": 0}
        return self.ask(messages, tools, **more)

    def stream(self, messages: list[Any], tools: list[Any]) -> dict[str, Any]:
        asked = {**self.asked, "messages": messages, "tools": tools, "stream": True}
        whole = litellm.stream_chunk_builder(list(litellm.completion(**asked)))
        assert whole is not None
        return whole.choices[0].message.model_dump()

    def drop_stream(self, messages: list[Any], tools: list[Any]) -> None:
        asked = {**self.asked, "messages": messages, "tools": tools, "stream": True}
        chunks = litellm.completion(**asked)
        next(iter(chunks))
        chunks.completion_stream.close()
