"""Reasoning between <think> and </think> at the start of an answer."""

from __future__ import annotations

from dataclasses import replace

from miles_core.sessions.messages import Message
from miles_core.sessions.parsers.blocks import safe_length

START = "<think>"
END = "</think>"


def _body(text: str, opened: bool) -> str | None:
    """What follows <think>; None when the answer does not begin with reasoning."""
    stripped = text.lstrip()
    if stripped.startswith(START):
        return stripped[len(START) :]
    return text if opened else None


def split_reasoning(text: str, opened: bool = False) -> tuple[str, str]:
    """Reasoning and the rest of an answer; `opened`: the prompt has opened the reasoning.

    Reasoning that is not closed goes to the end. Empty lines around it are taken off.
    """
    body = _body(text, opened)
    if body is None:
        return "", text
    reasoning, _, rest = body.partition(END)
    return reasoning.strip("\n"), rest.lstrip("\n")


def settled_reasoning(text: str, opened: bool = False) -> tuple[str, str | None]:
    """As `split_reasoning`, as far as nothing that follows `text` can change it.

    The rest is None while it is open whether there is any.
    """
    stripped = text.lstrip()
    if len(stripped) < len(START) and START.startswith(stripped):
        return "", None
    body = _body(text, opened)
    if body is None:
        return "", text
    if END in body:
        return split_reasoning(text, opened)
    return body[: safe_length(body, END)].strip("\n"), None


def render_reasoning(reasoning: str) -> str:
    """Reasoning as it stands before an answer's content, <think> included."""
    return f"{START}\n{reasoning}\n{END}\n\n"


def take_reasoning(message: Message) -> Message:
    """An answer whose content holds reasoning, with the reasoning in its place.

    So do the templates of models that think: a client that knows no reasoning sends it back in the
    content. What precedes <think>, or stands between two </think>, is left out, as there.
    """
    if message.reasoning_content or END not in message.content:
        return message
    reasoning = message.content.partition(END)[0].rstrip("\n").rpartition(START)[2].lstrip("\n")
    content = message.content.rpartition(END)[2].lstrip("\n")
    return replace(message, content=content, reasoning_content=reasoning)
