"""The tool-call notation of the Hermes and Qwen models: JSON between <tool_call> tags."""

from __future__ import annotations

from miles_core.sessions.messages import Message, ToolCall
from miles_core.sessions.parsers.blocks import call_json, read_call, safe_length, skip_space

START = "<tool_call>"
END = "</tool_call>"


def parse_calls(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    """Content and calls of an answer without its reasoning.

    When one block is incomplete or malformed, all of the text stays content and there is no call.
    """
    calls: list[ToolCall] = []
    outside: list[str] = []
    at = 0
    while (begin := text.find(START, at)) >= 0:
        outside.append(text[at:begin])
        read = read_call(text, begin + len(START))
        if read is None:
            return text, ()
        call, end = read
        end = skip_space(text, end)
        if not text.startswith(END, end):
            return text, ()
        calls.append(call)
        at = end + len(END)
    outside.append(text[at:])
    if not calls or any(END in part for part in outside):
        return text, ()
    before, after = outside[0].removesuffix("\n"), "".join(outside[1:]).strip()
    return "\n".join(part for part in (before, after) if part), tuple(calls)


def settled_content(text: str) -> str:
    """The part of the content that nothing which follows `text` can change."""
    return text[: safe_length(text, START)].removesuffix("\n")


def render_calls(message: Message) -> str:
    """Content and calls of an answer as text."""
    parts = [message.content] if message.content else []
    parts += [
        f"{START}\n{call_json(call.name, call.arguments_json)}\n{END}"
        for call in message.tool_calls
    ]
    return "\n".join(parts)
