"""The notation of the small models that this project makes: ChatML with as few tokens as can be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from miles_core.sessions.families.chatml import START, ChatMl
from miles_core.sessions.families.notation import Tools
from miles_core.sessions.messages import Message

TEMPLATE = Path(__file__).parents[1] / "templates" / "terse.jinja"
"""The same as a chat template, for the checkpoints to carry."""


class Terse(ChatMl):
    """ChatML without a description of tools, and with turns of the role `tool`."""

    name = "terse"
    exceptions: Mapping[str, str] = {}

    def conversation(self, messages: Sequence[Message], tools: Tools) -> str:
        return "".join(self.turns(messages))

    def turns(self, messages: Sequence[Message]) -> Iterator[str]:
        for message in messages:
            yield f"{START}{message.role}\n{self.answer(message)}\n"
