"""The tool-call notation of DeepSeek-V3: a name and fenced JSON between tokens of their own."""

from __future__ import annotations

from collections.abc import Sequence

from miles_core.sessions.messages import Message, ToolCall, clean_text
from miles_core.sessions.parsers.blocks import read_json, safe_length, skip_space

START, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
_MARKS = (START, END, CALL, CALL_END, SEPARATOR)
FENCE, FENCE_END = "\n```json\n", "\n```"


def split_calls(text: str) -> tuple[list[str], list[str]] | None:
    """The texts before and after the calls, and the calls' bodies; None if malformed.

    There is one section of calls, with nothing but white space between them.
    """
    before, start, rest = text.partition(START)
    section, end, after = rest.partition(END)
    if not start:
        return [text], []
    head, *parts = section.split(CALL)
    bodies = []
    for part in parts:
        body, call_end, gap = part.partition(CALL_END)
        if not call_end or gap.strip():
            return None
        bodies.append(body)
    outside = (before, head, after)
    if not end or head.strip() or any(mark in part for part in outside for mark in _MARKS):
        return None
    return [before, after], bodies


def parse_body(body: str) -> ToolCall | None:
    """The call `function<sep>NAME` and a fence with its arguments; None when it is malformed."""
    kind, separator, rest = body.partition(SEPARATOR)
    name, fence, fenced = rest.partition(FENCE)
    name = name.strip()
    if kind.strip() != "function" or not separator or not fence or name.split() != [name]:
        return None
    read = read_json(fenced, 0)
    if read is None or not isinstance(read[0], dict):
        return None
    if fenced[skip_space(fenced, read[1]) :].rstrip() != FENCE_END.lstrip("\n"):
        return None
    return ToolCall(name, read[0])


def join_content(outside: Sequence[str]) -> str:
    """The content of an answer with well-formed calls: what stands before and after them."""
    parts = [outside[0].rstrip(), *(part.strip() for part in outside[1:])]
    return "\n".join(part for part in parts if part)


def parse_calls(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    """Content and calls of an answer.

    When one call is incomplete or malformed, all of the text stays content and there is no call.
    """
    split = split_calls(text)
    if split is None or not split[1]:
        return text, ()
    calls = tuple(call for body in split[1] if (call := parse_body(body)) is not None)
    if len(calls) < len(split[1]):
        return text, ()
    return join_content(split[0]), calls


def settled_content(text: str) -> str:
    """The part of the content that nothing which follows `text` can change."""
    return text[: safe_length(text, START)].rstrip()


def write_call(name: str, arguments: str) -> str:
    """A call as text; `arguments` are JSON."""
    return f"{CALL}function{SEPARATOR}{name}{FENCE}{arguments}{FENCE_END}{CALL_END}"


def render_calls(message: Message) -> str:
    """Content and calls of an answer as text."""
    calls = [write_call(c.name, clean_text(c.arguments_json)) for c in message.tool_calls]
    section = "\n".join(calls)
    return f"{message.content}{START}{section}{END}" if calls else message.content
