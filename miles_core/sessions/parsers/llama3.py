"""The tool-call notation of Llama 3.1 and later: an answer that is JSON, with `parameters`."""

from __future__ import annotations

from miles_core.sessions.messages import Message, ToolCall
from miles_core.sessions.parsers.blocks import call_json, read_call, safe_length, skip_space

MARK = "<|python_tag|>"
_ARGUMENTS = ("parameters", "arguments")


def _objects(text: str) -> tuple[ToolCall, ...] | None:
    """The calls that `text` consists of, with semicolons or white space between them."""
    calls: list[ToolCall] = []
    at = skip_space(text, 0)
    while at < len(text):
        read = read_call(text, at, _ARGUMENTS)
        if read is None:
            return None
        calls.append(read[0])
        at = skip_space(text, read[1])
        if calls and text.startswith(";", at):
            at = skip_space(text, at + 1)
    return tuple(calls) or None


def parse_calls(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    """Content and calls of an answer.

    Calls are the whole answer, or stand after <|python_tag|>. When anything of them is malformed,
    all of the text stays content and there is no call.
    """
    before, mark, after = text.partition(MARK)
    calls = _objects(after) if mark else _objects(text)
    if calls is None:
        return text, ()
    return (before if mark else ""), calls


def settled_content(text: str) -> str:
    """The part of the content that nothing which follows `text` can change."""
    start = text.lstrip(" \t\r\n")
    if not start or start.startswith("{"):
        return ""
    return text[: safe_length(text, MARK)]


def render_calls(message: Message) -> str:
    """Content and calls of an answer as text."""
    calls = "; ".join(
        call_json(call.name, call.arguments_json, "parameters") for call in message.tool_calls
    )
    if calls and message.content:
        return f"{message.content.strip()}{MARK}{calls}"
    return calls or message.content.strip()
