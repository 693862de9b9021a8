"""Made-up conversations, sessions that walk through them, and real templates to compare with."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import Any

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from miles_core.sessions.families.notation import Notation
from miles_core.sessions.messages import Message, ToolCall

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Run a command.\nIts output is the result.",
            "parameters": {
                "type": "object",
                "properties": {
                    "command": {"type": "string", "description": "what to run"},
                    "timeout": {"type": "number", "description": "seconds", "default": 30},
                    "lines": {"type": "array", "items": {"type": "integer"}},
                    "raw": {"type": "boolean"},
                },
                "required": ["command"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "ersetze_datei",
            "description": "Ersetzt eine Datei – 置き換える 🙂",
            "parameters": {
                "type": "object",
                "properties": {
                    "mode": {"type": "string", "enum": ["all", "first"], "default": "all"},
                    "edit": {
                        "type": "object",
                        "properties": {
                            "old": {"type": "string"},
                            "new": {"type": "string"},
                            "deep": {"type": "array", "items": {"type": "object"}},
                        },
                        "required": ["old"],
                    },
                    "maybe": {"type": ["string", "null"]},
                    "either": {
                        "oneOf": [
                            {"type": "string", "description": "a name", "default": "x"},
                            {"type": "integer"},
                        ]
                    },
                    "any": {},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "now", "description": "The time."}},
]
_WORDS = [
    "ls -la", "größer", "日本語", "🙂", "a\nb", "\n\n", "\t", "  two", "<x>", "</tool", "{", '"',
    "\\", "`", "'", "0", "true", "null", "1.5e3", "[1]", "é", "\u00a0", "\u200b", "if x:\n  pass",
    "<|", "|>", "<thin", "to=", "&amp;", "\r\n", "مرحبا", "नमस्ते",
]  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """What the answers of a random conversation may hold."""

    reasoning: Sequence[bool] = (True, False)
    calls: Sequence[int] = (0, 0, 1, 1, 2, 3)
    content_beside_call: Sequence[bool] = (True, False)
    late_system: bool = True
    stray_results: bool = True
    unanswered_calls: bool = True


def random_text(rng: random.Random, least: int = 0) -> str:
    return " ".join(rng.choice(_WORDS) for _ in range(rng.randint(least, 6)))


def random_value(rng: random.Random, depth: int = 0) -> Any:
    plain: list[Callable[[], Any]] = [
        lambda: random_text(rng), lambda: rng.randint(-9, 10**12), lambda: rng.random(),
        lambda: True, lambda: False, lambda: None,
    ]  # fmt: skip
    nested: list[Callable[[], Any]] = [
        lambda: [random_value(rng, depth + 1) for _ in range(rng.randint(0, 3))],
        lambda: {random_text(rng, 1): random_value(rng, depth + 1) for _ in range(2)},
    ]
    return rng.choice(plain + nested if depth < 2 else plain)()


def random_call(rng: random.Random, number: int) -> ToolCall:
    """A call that fits `TOOLS`: a text where the schema says so, and no text where it does not."""
    name = rng.choice(["bash", "ersetze_datei", "now"])
    arguments: dict[str, Any] = {}
    if name == "bash":
        arguments["command"] = random_text(rng)
        if rng.random() < 0.5:
            arguments |= {"timeout": rng.choice([1, 2.5]), "lines": [1, 2], "raw": True}
    elif name == "ersetze_datei":
        arguments["edit"] = {"old": random_text(rng), "deep": [{"value": random_value(rng)}]}
        if rng.random() < 0.5:
            arguments |= {"mode": "all", "maybe": None}
    return ToolCall(name, arguments, f"call_{number}")


def random_answer(rng: random.Random, shape: Shape, number: int) -> Message:
    calls = tuple(random_call(rng, number * 10 + i) for i in range(rng.choice(shape.calls)))
    content = random_text(rng) if not calls or rng.choice(shape.content_beside_call) else ""
    reasoning = "I think " + random_text(rng) if rng.choice(shape.reasoning) else ""
    return Message("assistant", content, calls, reasoning)


def random_conversation(
    rng: random.Random, shape: Shape = Shape(), turns: int = 6
) -> list[Message]:
    """A conversation that begins with a user's message, perhaps after a system message."""
    messages = [Message("system", random_text(rng, 1))] if rng.random() < 0.6 else []
    messages.append(Message("user", random_text(rng, 1)))
    for number in range(rng.randint(0, turns)):
        answer = random_answer(rng, shape, number)
        messages.append(answer)
        skipped = shape.unanswered_calls and rng.random() < 0.1
        for call in answer.tool_calls if not skipped else ():
            messages.append(Message("tool", random_text(rng), (), "", call.id))
        if shape.stray_results and rng.random() < 0.1:
            messages.append(Message("tool", random_text(rng), (), "", "", "bash"))
        if shape.late_system and rng.random() < 0.1:
            messages.append(Message("system", random_text(rng, 1)))
        if not answer.tool_calls or skipped or rng.random() < 0.2:
            messages.append(Message("user", random_text(rng, 1)))
    return messages


def stop_of(notation: Notation, text: str) -> str | None:
    return next((stop for stop in notation.stops if text.endswith(stop)), None)


def walk(notation: Notation, messages: Sequence[Message], tools: Any) -> list[str]:
    """The pieces of a session: prompt, answer, what follows it, answer, ... up to a prompt.

    The last message is no answer.
    """
    answers = [i for i, message in enumerate(messages) if message.role == "assistant"]
    first = answers[0] if answers else len(messages)
    opening = messages[:first]
    pieces = [notation.prompt(opening, tools)]
    for at, after in zip(answers, [*answers[1:], len(messages)], strict=False):
        answer = notation.answer(messages[at])
        pieces.append(answer)
        new = messages[at + 1 : after]
        stop = stop_of(notation, answer)
        pieces.append(notation.continuation(messages[at : at + 1], stop, new, tools))
    return pieces


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


@cache
def _compiled(template: str) -> jinja2.Template:
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _refuse
    env.globals["strftime_now"] = datetime.now().strftime
    return env.from_string(template)


def render(template: str, messages: Sequence[dict[str, Any]], **values: Any) -> str:
    """A real template's text, as Hugging Face's libraries render it."""
    return _compiled(template).render(messages=list(messages), **values)


def check_settled(notation: Notation, text: str) -> None:
    """What is settled only grows, and begins what `parse` gives for anything longer."""
    final = notation.parse(text)
    before = ("", "")
    for size in range(len(text) + 1):
        now = notation.settled(text[:size])
        assert now[0].startswith(before[0]), (text[:size], before, now)
        assert now[1].startswith(before[1]), (text[:size], before, now)
        before = now
        parsed = notation.parse(text[:size])
        assert parsed.reasoning_content.startswith(now[0]), (text[:size], now, parsed)
        assert parsed.content.startswith(now[1]), (text[:size], now, parsed)
    assert final.reasoning_content.startswith(before[0]), (text, before, final)
    assert final.content.startswith(before[1]), (text, before, final)


def hostile_texts(notation: Notation, marks: Sequence[str], count: int) -> list[str]:
    """Texts that are made of a notation's marks and of cuttings of its answers."""
    rng = random.Random(5)
    out = []
    for number in range(count):
        pieces = []
        for _ in range(rng.randint(1, 6)):
            kind = rng.random()
            if kind < 0.5:
                pieces.append(rng.choice(list(marks)))
            elif kind < 0.75:
                whole = notation.answer(random_answer(rng, Shape(), number))
                begin = rng.randint(0, len(whole) - 1) if rng.random() < 0.5 else 0
                pieces.append(whole[begin : rng.randint(begin, len(whole))])
            else:
                pieces.append(rng.choice([*_WORDS, *string.ascii_letters]))
        out.append("".join(pieces))
    return out
