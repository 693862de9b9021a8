"""Chat messages: one plain form of what clients send, and when two messages are the same."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant",
         "tool": "tool", "function": "tool"}  # fmt: skip


class MessageError(ValueError):
    """A request's messages cannot be understood; the text tells the client why."""


@dataclass(frozen=True)
class ToolCall:
    """One call: `arguments` is the JSON object as Python, or the text when it is not JSON.

    `id` ties a result to its call; it does not make two calls different.
    """

    name: str
    arguments: Any
    id: str = field(default="", compare=False)

    @property
    def arguments_json(self) -> str:
        if isinstance(self.arguments, str):
            return self.arguments
        return json.dumps(self.arguments, ensure_ascii=False)


@dataclass(frozen=True)
class Message:
    """A message with everything that a template or a comparison needs, and nothing else.

    Roles are `system`, `user`, `assistant` and `tool`. `tool_call_id` and `name` tell which call a
    `tool` message answers, where the client says so.
    """

    role: str
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning_content: str = ""
    tool_call_id: str = field(default="", compare=False)
    name: str = field(default="", compare=False)

    def raw(self) -> dict[str, Any]:
        """The form that a checkpoint's own template expects: OpenAI's, arguments as an object."""
        out: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning_content:
            out["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            out["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.tool_calls
            ]
        if self.role == "tool":
            out |= {"tool_call_id": self.tool_call_id, "name": self.name}
        return out

    def with_call_ids(self, prefix: str) -> Message:
        """This message with ids for its calls: `prefix` and a number."""
        if not self.tool_calls:
            return self
        calls = (
            replace(call, id=f"{prefix}_{index}") for index, call in enumerate(self.tool_calls)
        )
        return replace(self, tool_calls=tuple(calls))

    def same_as(self, other: Message) -> bool:
        """Whether `other`, sent by a client, is this recorded message.

        Arguments are compared as typed JSON, so that a re-serialised call is the same call. Of an
        assistant's message a client may trim the white space and leave out the reasoning.
        """
        if self.role != other.role or len(self.tool_calls) != len(other.tool_calls):
            return False
        if self.role != "assistant":
            return self.content == other.content
        if self.content.strip() != other.content.strip():
            return False
        reasoning = other.reasoning_content.strip()
        if reasoning and reasoning != self.reasoning_content.strip():
            return False
        return all(
            mine.name == theirs.name and _canonical(mine.arguments) == _canonical(theirs.arguments)
            for mine, theirs in zip(self.tool_calls, other.tool_calls, strict=True)
        )


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def clean_text(text: str) -> str:
    """`text` with lone surrogates (which UTF-8 has no bytes for) replaced by U+FFFD."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _content(value: Any, where: str) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, list):
        parts = []
        for part in value:
            if isinstance(part, str):
                parts.append(part)
            elif isinstance(part, dict) and isinstance(part.get("text"), str):
                parts.append(part["text"])
            else:
                raise MessageError(f"{where}: only text content is supported")
        return clean_text("".join(parts))
    raise MessageError(f"{where}: content must be a string, a list of text parts, or null")


def _tool_call(call: Any, where: str) -> ToolCall:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise MessageError(f"{where}: a tool call needs function.name")
    call_id = _text(call.get("id"))
    arguments = function.get("arguments")
    if arguments is None or arguments == "":
        arguments = {}
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            return ToolCall(clean_text(function["name"]), clean_text(arguments), call_id)
        if isinstance(parsed, dict):
            arguments = parsed
    return ToolCall(clean_text(function["name"]), arguments, call_id)


def _text(value: Any) -> str:
    return clean_text(value) if isinstance(value, str) else ""


def parse_message(item: Any, where: str) -> Message:
    """One message as a client sends it; `where` names it in a `MessageError`."""
    if isinstance(item, Message):
        return item
    if not isinstance(item, dict):
        raise MessageError(f"{where} must be an object")
    role = ROLES.get(str(item.get("role")))
    if role is None:
        raise MessageError(f"{where}: unknown role {item.get('role')!r}")
    calls = item.get("tool_calls") or []
    if not isinstance(calls, list):
        raise MessageError(f"{where}: tool_calls must be a list")
    return Message(
        role,
        _content(item.get("content"), where),
        tuple(_tool_call(call, where) for call in calls),
        _text(item.get("reasoning_content") or item.get("reasoning")),
        _text(item.get("tool_call_id")),
        _text(item.get("name")),
    )


def parse_messages(value: Any) -> list[Message]:
    """The messages of a request; raises `MessageError` for what no template can render."""
    if not isinstance(value, list) or not value:
        raise MessageError("messages must be a non-empty list")
    return [parse_message(item, f"messages[{index}]") for index, item in enumerate(value)]
