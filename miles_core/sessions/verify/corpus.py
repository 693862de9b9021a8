"""Conversations, drawn at random, with all that agents and models are known to do."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from miles_core.sessions.messages import Message, ToolCall
from miles_core.sessions.parsers.reasoning import render_reasoning

TEXTS = (
    "List the files.",
    "The answer is 42.",
    "def f(x):\n    return x * 2\n",
    "naïve café, straße",
    "中文和日本語、한국어",
    "e\u0301 and a\u0308\u0323 combine",
    "مرحبا שלום \u200f(right to left)\u200e",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽",
    "tab\there, bell\x07, escape\x1b[31m, delete\x7f, separator\u2028",
    "a & b < c > d \"quoted\" 'single' \\ back",
    "{{ not.a.template }} {% if x %} {# y #}",
    "<b>tags</b> </i> <think",
    '{"json": [1, 2.5, null, true], "deep": {"a": {}}}',
    "many\n\n\nline\n\nbreaks",
    "x" * 300,
    "word " * 200 + "end",
    "0",
    "\U00010348 \U0010fffd",
)
PROPERTIES: dict[str, dict[str, Any]] = {
    "command": {"type": "string", "description": "what to run"},
    "count": {"type": "integer"},
    "größe": {"type": "number"},
    "force": {"type": "boolean"},
    "path": {"type": ["string", "null"]},
    "lines": {"type": "array", "items": {"type": "integer"}},
    "options": {"type": "object"},
}
# What may stand between two answers, besides one user's message.
_BETWEEN = (["user", "user"], ["system", "user"], ["user", "system"], ["system"])
# White space around what a user or a tool says: what a command writes ends with a line break.
_EDGES = (("", ""), ("", ""), ("", "\n"), ("", "\n"), ("  ", ""), ("\n\n", " \t"))
NAMES = ("bash", "read_file", "search-web", "f")


@dataclass(frozen=True)
class Conversation:
    """Messages, and the tools that a request offers with them."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()

    def answers(self) -> list[int]:
        """Positions of the assistant's messages."""
        return [i for i, m in enumerate(self.messages) if m.role == "assistant"]


def thinking_aloud(conversation: Conversation) -> Conversation:
    """The same where nobody knows reasoning from content, so that it stands at its beginning."""
    messages = tuple(
        replace(
            message,
            content=render_reasoning(message.reasoning_content) + message.content,
            reasoning_content="",
        )
        if message.reasoning_content
        else message
        for message in conversation.messages
    )
    return Conversation(messages, conversation.tools)


def make_tools(rng: random.Random) -> tuple[dict[str, Any], ...]:
    """All tools, in some order, as OpenAI's requests have them."""
    return tuple(
        {
            "type": "function",
            "function": {
                "name": name,
                "description": rng.choice(TEXTS),
                "parameters": {
                    "type": "object",
                    "properties": PROPERTIES,
                    "required": ["command"],
                },
            },
        }
        for name in rng.sample(NAMES, len(NAMES))
    )


def about(words: Sequence[str]) -> list[Conversation]:
    """Conversations in which each of `words` is in turn what one kind of message says.

    For the texts that a template looks for, such as a switch in a system message. There are some
    of each shape also without words.
    """
    user, answer = Message("user", "List the files."), Message("assistant", "The answer is 42.")
    call = ToolCall("bash", {"command": "ls"}, "call00000")
    called, tools = Message("assistant", "", (call,)), make_tools(random.Random(0))
    found = [Conversation((user, called, user, answer, user), tools)]
    for word in ("Be brief.", *words):
        result = Message("tool", word, (), "", call.id, call.name)
        system, asked = Message("system", word), Message("user", word)
        more = Message("system", f"Be kind. {word}")
        found += [
            Conversation((system, user, answer, user)),
            Conversation((more, user, called, replace(result, content="one"), answer, user), tools),
            Conversation((asked, answer, user, answer, asked)),
            Conversation((user, called, result, answer, user), tools),
            Conversation((user, answer, system, answer, user, answer, system)),
        ]
    return found


class Writer:
    """Draws conversations. The same seed draws the same ones."""

    def __init__(self, seed: int, reasoning: bool = True) -> None:
        self._rng, self._reasoning, self._calls = random.Random(seed), reasoning, 0

    def conversations(self, number: int) -> list[Conversation]:
        """The plain ones first: they are the easiest to read where something is wrong."""
        kinds: list[Callable[[], Conversation]] = [
            self.plain, self.with_tools, self.with_calls, self.any, self.words, self.any,
        ]  # fmt: skip
        return [kinds[i % len(kinds)]() for i in range(number)]

    def text(self) -> str:
        """A text without white space at its ends."""
        pieces = [self._rng.choice(TEXTS) for _ in range(self._rng.choice((1, 1, 2, 3)))]
        return self._rng.choice((" ", "\n")).join(pieces).strip()

    def given(self) -> str:
        """A text of a user, a system message or a tool, often with white space at its ends."""
        before, after = self._rng.choice(_EDGES)
        return f"{before}{self.text()}{after}"

    def arguments(self, offered: bool) -> dict[str, Any]:
        """Arguments as the tools' schemas have them; only plain words where none is `offered`."""
        rng = self._rng
        if not offered:
            return {key: f"see {self.text()}" for key in rng.sample(("command", "path"), 1)}
        values: dict[str, list[Any]] = {
            "command": [self.text(), self.text(), "", "42", '{"a": 1}'],
            "count": [0, -7, 12345678901234567890],
            "größe": [2.5, 3, 1e-9],
            "force": [True, False],
            "path": [self.text(), None],
            "lines": [[], [1, 2]],
            "options": [{}, {"a": {"b": [None, "two"]}}],
        }
        some = rng.sample(list(values), rng.randint(0, 4))
        return {key: rng.choice(values[key]) for key in some}

    def answer(self, calls: int = 0, offered: bool = True) -> Message:
        """An answer with that many calls, to tools that the request offers or does not."""
        made = []
        for _ in range(calls):
            self._calls += 1
            call_id = f"call{self._calls:05}"
            made.append(ToolCall(self._rng.choice(NAMES), self.arguments(offered), call_id))
        content = self.text() if not calls or self._rng.random() < 0.4 else ""
        thought = self.text() if self._rng.random() < 0.5 and self._reasoning else ""
        return Message("assistant", content, tuple(made), thought)

    def results(self, answer: Message) -> list[Message]:
        """The results of an answer's calls."""
        return [
            Message("tool", self._rng.choice((self.given(), "")), (), "", call.id, call.name)
            for call in answer.tool_calls
        ]

    def plain(self) -> Conversation:
        """System, user, answer, user."""
        messages = [Message("system", self.given()), Message("user", self.given()), self.answer()]
        return Conversation((*messages, Message("user", self.given())))

    def words(self) -> Conversation:
        """Users and answers in turn, and nothing else: what every template has a form for."""
        messages = [Message("user", self.text())]
        for _ in range(self._rng.randint(1, 3)):
            messages += [self.answer(), Message("user", self.given())]
        return Conversation(tuple(messages))

    def with_tools(self) -> Conversation:
        """A question, an answer with one call, its result."""
        answer = self.answer(1)
        opening = [Message("user", self.given()), answer]
        return Conversation((*opening, *self.results(answer)), make_tools(self._rng))

    def with_calls(self) -> Conversation:
        """Several turns with calls, in parallel too, then a second question."""
        messages = [Message("system", self.given()), Message("user", self.given())]
        for _ in range(self._rng.randint(2, 4)):
            answer = self.answer(self._rng.choice((1, 1, 2, 3)))
            messages += [answer, *self.results(answer)]
        messages += [self.answer(), Message("user", self.given())]
        return Conversation(tuple(messages), make_tools(self._rng))

    def any(self) -> Conversation:
        """Anything: late system messages, several users in a row, empty texts, many turns."""
        rng = self._rng
        offered = rng.random() < 0.7
        messages = [Message("system", self.given())] if rng.random() < 0.5 else []
        messages.append(Message("user", self.given()))
        for _ in range(rng.randint(1, 8)):
            answer = self.answer(rng.choice((0, 0, 1, 2)), offered)
            if not answer.tool_calls and rng.random() < 0.15:
                answer = Message("assistant", "", (), answer.reasoning_content)
            messages += [answer, *self.results(answer)]
            if not answer.tool_calls or rng.random() < 0.2:
                roles = rng.choice((["user"], ["user"], *_BETWEEN))
                messages += [Message(role, rng.choice((self.given(), ""))) for role in roles]
        return Conversation(tuple(messages), make_tools(rng) if offered else ())
