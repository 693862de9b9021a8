"""A notation: how one kind of checkpoint writes a conversation as text.

A session is a sequence of ids that only grows. First there is the `prompt`; then comes what the
model sampled; then `continuation`, which begins where the sampled ids end; and so on. So a notation
never looks at an answer again: what was sampled stays.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from miles_core.sessions.messages import Message

Tools = Sequence[dict[str, Any]]


class NotAppendOnly(ValueError):
    """A template renders the recorded part of a conversation differently once it goes on."""


class Notation(Protocol):
    """Text of conversations and messages of text. Implementations are stateless.

    Methods that render raise `MessageError` for what the notation has no form for.
    """

    name: str
    tokens: tuple[str, ...]
    """Special tokens that a tokenizer must have for this notation, the first of `stops` too."""
    stops: tuple[str, ...]
    """Tokens that end an answer; the first is the one that closes an answer which was cut off.

    Those that a tokenizer lacks are left out, but for the first.
    """
    local: bool
    """Whether `continuation` needs nothing of `previous` but its last message."""
    reasoning: bool
    """Whether answers have a form for reasoning; where not, it is left out, as their templates do.
    """
    exceptions: Mapping[str, str]
    """Features of a conversation (`features.FEATURES`) in which the templates of these checkpoints
    are departed from, with the reason. Without them the texts are equal, character by character.
    """

    def conversation(self, messages: Sequence[Message], tools: Tools) -> str:
        """A whole conversation without generation prompt at its end.

        Each answer is in its canonical form: the generation prompt and `answer`. So the prompt of
        a conversation is that of its beginning, `answer`, and `continuation`.
        """
        ...

    def prompt(self, messages: Sequence[Message], tools: Tools) -> str:
        """A whole conversation with what stands before the next answer, and is no part of it."""
        ...

    def answer(self, message: Message) -> str:
        """The text, stop token included, that a model answers `message` with."""
        ...

    def continuation(
        self, previous: Sequence[Message], stop: str | None, new: Sequence[Message], tools: Tools
    ) -> str:
        """What follows an answer: its end where it was cut off, `new`, the generation prompt.

        `previous` ends with the answer. `stop` is the stop token that the answer was ended by,
        which may also open the next turn; None: it has none, and the text begins with one.
        """
        ...

    def parse(self, text: str, tools: Tools = ()) -> Message:
        """The message of an answer, whose stop token has been taken off.

        `tools` are those of the request: where a notation writes strings without quotes, their
        schemas tell a string from a number. Everything that is no well-formed call or reasoning
        stays content as it is: nothing is dropped. Never raises.
        """
        ...

    def settled(self, text: str) -> tuple[str, str]:
        """Reasoning and content of `parse(text + more)` that no `more` can change: to stream.

        Both only grow with `text`, and are prefixes of what `parse` gives in the end.
        """
        ...


class PromptByLast(ABC):
    """The prompt of notations whose generation prompt follows from the last message alone."""

    @abstractmethod
    def conversation(self, messages: Sequence[Message], tools: Tools) -> str: ...

    @abstractmethod
    def generation_prompt(self, last: Message | None) -> str:
        """What stands before an answer that follows the message `last`, and is no part of it.

        Most notations have the same for all; some have none after the result of a tool. None: the
        conversation is empty.
        """

    def prompt(self, messages: Sequence[Message], tools: Tools) -> str:
        last = messages[-1] if messages else None
        return self.conversation(messages, tools) + self.generation_prompt(last)
