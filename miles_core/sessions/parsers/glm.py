"""The tool-call notation of GLM-4.5 and later: a name, then keys and values between tags.

A value is the text itself where it is a string, and JSON where it is something else, so that only
the tool's JSON schema tells the string `7` from the number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from miles_core.sessions.messages import Message, ToolCall, clean_text
from miles_core.sessions.parsers.blocks import read_json, safe_length, skip_space
from miles_core.sessions.parsers.text import json_text

START, END = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"
_MARKS = (START, END, KEY, KEY_END, VALUE, VALUE_END)

Tools = Sequence[dict[str, Any]]


def split_blocks(text: str) -> tuple[list[str], list[str]] | None:
    """The texts outside of calls (one more than calls) and the calls' bodies, if balanced."""
    first, *parts = text.split(START)
    outside, bodies = [first], []
    for part in parts:
        body, end, after = part.partition(END)
        if not end:
            return None
        bodies.append(body)
        outside.append(after)
    if any(END in part for part in outside):
        return None
    return outside, bodies


def split_body(body: str) -> tuple[str, list[tuple[str, str]]] | None:
    """Name and raw arguments of a call; None when it is malformed.

    White space around the tags does not count, that inside of a value does. A tag inside of a
    value means that another one was forgotten, so it is malformed too.
    """
    head, *parts = body.split(KEY)
    name = head.strip()
    if not name or any(mark in head for mark in _MARKS) or name.split() != [name]:
        return None
    pairs: list[tuple[str, str]] = []
    for part in parts:
        key, key_end, rest = part.partition(KEY_END)
        value, value_end, tail = rest.lstrip().removeprefix(VALUE).partition(VALUE_END)
        pieces = (key, value, tail)
        if not (key_end and value_end and rest.lstrip().startswith(VALUE)) or tail.strip():
            return None
        if not key.strip() or any(mark in piece for piece in pieces for mark in _MARKS):
            return None
        pairs.append((key.strip(), value))
    if len({key for key, _ in pairs}) < len(pairs):
        return None
    return name, pairs


_JSON_TYPES = ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"),
               (list, "array"), (dict, "object"))  # fmt: skip


def _type_of(value: Any) -> str:
    return next((name for kind, name in _JSON_TYPES if isinstance(value, kind)), "null")


def _types(schema: Any) -> set[str] | None:
    """The JSON types that a schema allows; None where it does not say."""
    if not isinstance(schema, dict):
        return None
    kind = schema.get("type")
    if isinstance(kind, str):
        found = {kind}
    elif isinstance(kind, list) and all(isinstance(one, str) for one in kind):
        found = set(kind)
    elif isinstance(schema.get("enum"), list):
        found = {_type_of(choice) for choice in schema["enum"]}
    else:
        return _union(schema.get("anyOf") or schema.get("oneOf"))
    return found | {"integer"} if "number" in found else found


def _union(schemas: Any) -> set[str] | None:
    found: set[str] = set()
    for schema in schemas if isinstance(schemas, list) else ():
        one = _types(schema)
        if one is None:
            return None
        found |= one
    return found or None


def _properties(tools: Tools, name: str) -> dict[str, Any]:
    """The schemas of a tool's arguments, as far as its definition has them."""
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, dict) and function.get("name") == name:
            parameters = function.get("parameters")
            found = parameters.get("properties") if isinstance(parameters, dict) else None
            return found if isinstance(found, dict) else {}
    return {}


def read_value(raw: str, schema: Any) -> Any:
    """A value: JSON, but text where the schema wants a string or where it is no JSON."""
    read = read_json(raw, 0)
    if read is None or skip_space(raw, read[1]) < len(raw):
        return raw
    types = _types(schema)
    if types is None or "string" not in types:
        return read[0]
    kind = _type_of(read[0])
    return read[0] if kind != "string" and kind in types else raw


def parse_body(body: str, tools: Tools) -> ToolCall | None:
    """The call of a body, or None when it is malformed."""
    split = split_body(body)
    if split is None:
        return None
    name, pairs = split
    return ToolCall(name, read_values(name, pairs, tools))


def read_values(name: str, pairs: Sequence[tuple[str, str]], tools: Tools) -> dict[str, Any]:
    """The arguments of a call to the tool `name`."""
    schemas = _properties(tools, name)
    return {key: read_value(raw, schemas.get(key)) for key, raw in pairs}


def join_content(outside: Sequence[str]) -> str:
    """The content of an answer with well-formed calls: what stands outside of them."""
    parts = [outside[0].rstrip(), *(part.strip() for part in outside[1:])]
    return "\n".join(part for part in parts if part)


def parse_calls(text: str, tools: Tools = ()) -> tuple[str, tuple[ToolCall, ...]]:
    """Content and calls of an answer without its reasoning.

    When one call is incomplete or malformed, all of the text stays content and there is no call.
    """
    blocks = split_blocks(text)
    if blocks is None or not blocks[1]:
        return text, ()
    calls = tuple(call for body in blocks[1] if (call := parse_body(body, tools)) is not None)
    if len(calls) < len(blocks[1]):
        return text, ()
    return join_content(blocks[0]), calls


def settled_content(text: str) -> str:
    """The part of the content that nothing which follows `text` can change."""
    return text[: safe_length(text, START)].rstrip()


def render_call(call: ToolCall, line: str) -> str:
    """A call as text, with `line` (a line break or nothing) between its parts."""
    if not isinstance(call.arguments, dict):
        return f"{START}{call.name}{line}{clean_text(call.arguments_json)}{line}{END}"
    pairs = "".join(
        f"{KEY}{clean_text(key)}{KEY_END}{line}{VALUE}{_value_text(value)}{VALUE_END}{line}"
        for key, value in call.arguments.items()
    )
    return f"{START}{call.name}{line}{pairs}{END}"


def _value_text(value: Any) -> str:
    return clean_text(value) if isinstance(value, str) else json_text(value)


def render_answer(message: Message, line: str) -> str:
    """Content and calls of an answer as text, each part after `line`."""
    content = message.content.strip()
    parts = [content] if content else []
    parts += [render_call(call, line) for call in message.tool_calls]
    return "".join(line + part for part in parts)
