"""The notations of Qwen2.5 and Qwen3."""

from __future__ import annotations

from collections.abc import Mapping

from miles_core.sessions.families.chatml import ChatMl, Thinking

_OLD_REASONING = (
    "the template drops an answer's reasoning once a user message follows, which would rewrite "
    "what was sampled; here it stays"
)


class Qwen25(ChatMl):
    """Qwen2.5-Instruct: a system message of its own, tools in Hermes notation, no reasoning."""

    name = "qwen2.5"
    exceptions: Mapping[str, str] = {}
    default_system: str | None = (
        "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
    )


class Qwen3Instruct(ChatMl):
    """Qwen3-*-Instruct-2507, which does not think."""

    name = "qwen3-instruct"
    exceptions: Mapping[str, str] = {}


class Qwen3(Thinking):
    """Qwen3, which thinks or does not, as it is asked."""

    name = "qwen3"
    exceptions: Mapping[str, str] = {"old_reasoning": _OLD_REASONING}


class Qwen3Thinking(Thinking):
    """Qwen3-*-Thinking-2507: the generation prompt opens the reasoning."""

    name = "qwen3-thinking"
    opened = True
    exceptions: Mapping[str, str] = {
        "old_reasoning": _OLD_REASONING,
        "no_reasoning": "the template leaves out the empty reasoning of an answer that is not the "
        "last, which the generation prompt had opened; here it stays",
    }
