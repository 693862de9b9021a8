"""The tool-call notation of Qwen3-Coder and Qwen3.5: a function and its parameters between tags."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from miles_core.sessions.messages import Message, ToolCall
from miles_core.sessions.parsers import glm
from miles_core.sessions.parsers.reasoning import settled_reasoning, split_reasoning
from miles_core.sessions.parsers.text import json_text

_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
# Their templates write what is no text and no collection as Python does.
_PYTHON = {"True": "true", "False": "false", "None": "null"}

Tools = Sequence[dict[str, Any]]


def _pairs(text: str) -> list[tuple[str, str]] | None:
    """Keys and raw values of parameters; None when anything else stands between them."""
    pairs: list[tuple[str, str]] = []
    while text := text.strip():
        head, end, text = text.partition(_PARAMETER_END)
        key, close, value = head.removeprefix(_PARAMETER).partition(">")
        if not head.startswith(_PARAMETER) or not end or not close or not key.strip():
            return None
        pairs.append((key.strip(), value.removeprefix("\n").removesuffix("\n")))
    return pairs if len({key for key, _ in pairs}) == len(pairs) else None


def _call(body: str, tools: Tools) -> ToolCall | None:
    """The call between <tool_call> and </tool_call>; None when it is malformed."""
    body = body.strip()
    name, close, inner = body.removeprefix(_FUNCTION).partition(">")
    name = name.strip()
    if not body.startswith(_FUNCTION) or not body.endswith(_FUNCTION_END) or not close or not name:
        return None
    pairs = _pairs(inner.removesuffix(_FUNCTION_END))
    if pairs is None:
        return None
    as_json = [(key, _PYTHON.get(raw, raw)) for key, raw in pairs]
    values = glm.read_values(name, as_json, tools)
    for key, raw in pairs:
        if isinstance(values[key], str):
            values[key] = raw
    return ToolCall(name, values)


def render_calls(message: Message, as_python: bool) -> str:
    """Content and calls of an answer as text; `as_python`: plain values are written as Python's."""
    content = message.content.strip()
    calls = "\n".join(_call_text(call, as_python) for call in message.tool_calls)
    return "\n\n".join(part for part in (content, calls) if part)


def _call_text(call: ToolCall, as_python: bool) -> str:
    given = call.arguments if isinstance(call.arguments, dict) else {}
    pairs = "".join(
        f"{_PARAMETER}{key}>\n{_value_text(value, as_python)}\n{_PARAMETER_END}\n"
        for key, value in given.items()
    )
    return f"<tool_call>\n{_FUNCTION}{call.name}>\n{pairs}{_FUNCTION_END}\n</tool_call>"


def _value_text(value: Any, as_python: bool) -> str:
    plain = as_python and not isinstance(value, dict | list)
    return str(value) if plain or isinstance(value, str) else json_text(value)


class QwenXml:
    """Reads answers; `opened`: the generation prompt has opened the reasoning."""

    name = "qwen-xml"

    def __init__(self, opened: bool) -> None:
        self.opened = opened

    def parse(self, text: str, tools: Tools = ()) -> Message:
        """As `Notation.parse`."""
        reasoning, rest = split_reasoning(text, self.opened)
        blocks = glm.split_blocks(rest)
        bodies = blocks[1] if blocks else []
        calls = tuple(call for body in bodies if (call := _call(body, tools)) is not None)
        if blocks is None or not calls or len(calls) < len(bodies):
            return Message("assistant", rest, (), reasoning)
        return Message("assistant", glm.join_content(blocks[0]), calls, reasoning)

    def settled(self, text: str) -> tuple[str, str]:
        """As `Notation.settled`."""
        reasoning, rest = settled_reasoning(text, self.opened)
        return reasoning, "" if rest is None else glm.settled_content(rest)
