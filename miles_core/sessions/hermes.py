"""The tool-call notation of the Hermes and Qwen models: JSON between <tool_call> tags."""

from __future__ import annotations

import json
import re
from typing import Any

from miles_core.sessions.messages import Message, ToolCall

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_THINK = re.compile(r"\A\s*<think>(.*?)</think>\s*", re.DOTALL)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _parse_call(text: str) -> ToolCall | None:
    """One call, or None when it is malformed."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return None
        if not value["name"] or not isinstance(value.get("arguments"), dict):
            return None
        # Escaped lone surrogates are JSON, but have no UTF-8 form that an answer could carry.
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return ToolCall(value["name"], value["arguments"])


def parse_answer(text: str) -> Message:
    """An assistant's text as a message.

    Thinking at the start becomes `reasoning_content`. When every <tool_call> block is complete and
    well formed they become tool calls; else the text stays content as it is.
    """
    reasoning = ""
    thought = _THINK.match(text)
    if thought:
        reasoning = thought[1].strip("\n")
        text = text[thought.end() :]
    outside = _CALL.sub("", text)
    blocks = _CALL.findall(text)
    calls = [_parse_call(block) for block in blocks]
    well_formed = tuple(call for call in calls if call is not None)
    if (
        not blocks
        or len(well_formed) != len(blocks)
        or "<tool_call>" in outside
        or "</tool_call>" in outside
    ):
        return Message("assistant", text, (), reasoning)
    before = text[: text.index("<tool_call>")].removesuffix("\n")
    after = outside[text.index("<tool_call>") :].strip()
    content = "\n".join(part for part in (before, after) if part)
    return Message("assistant", content, well_formed, reasoning)
