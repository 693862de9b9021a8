"""The notations of Llama 3, 3.1, 3.2 and 3.3."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime

from miles_core.sessions.families.notation import PromptByLast, Tools
from miles_core.sessions.messages import Message
from miles_core.sessions.parsers import llama3

_END = "<|eot_id|>"
_EXCEPTIONS = {
    "several_calls": "the template refuses an answer with several calls; here they stand one "
    "after the other, with semicolons between them",
    "content_beside_call": "the template drops the content beside a call; here it stays, and the "
    "call follows <|python_tag|>",
    "tools_without_question": "the template takes any first message for a user's and puts it into "
    "the turn that describes tools; here only a user's message is put there",
}


def _turn(role: str, text: str) -> str:
    return f"<|start_header_id|>{role}<|end_header_id|>\n\n{text}{_END}"


def _tools_text(tools: Tools) -> str:
    listed = "".join(f"{json.dumps(tool, ensure_ascii=False, indent=4)}\n\n" for tool in tools)
    return (
        "Given the following functions, please respond with a JSON for a function call with its "
        "proper arguments that best answers the given prompt.\n\nRespond in the format "
        '{"name": function name, "parameters": dictionary of argument name and its value}.'
        f"Do not use variables.\n\n{listed}"
    )


class Llama3(PromptByLast):
    """Llama 3.1 and 3.3: a system turn with dates, tools in the first turn after it.

    A call is a JSON object, the result of one a JSON string of the role `ipython`.
    """

    name = "llama3"
    tokens: tuple[str, ...] = (
        "<|begin_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        _END,
    )
    stops: tuple[str, ...] = (_END, "<|eom_id|>")
    local = True
    reasoning = False
    exceptions: Mapping[str, str] = _EXCEPTIONS

    def today(self) -> str:
        """The date that the system turn names."""
        return "26 Jul 2024"

    def opening(self, system: str | None, tools: Tools) -> str:
        """The system turn; `system` is the conversation's own message."""
        environment = "Environment: ipython\n" if tools else ""
        dates = f"Cutting Knowledge Date: December 2023\nToday Date: {self.today()}\n\n"
        return _turn("system", environment + dates + (system or ""))

    def conversation(self, messages: Sequence[Message], tools: Tools) -> str:
        system, rest = None, messages
        if messages and messages[0].role == "system":
            system, rest = messages[0].content.strip(), messages[1:]
        text = "<|begin_of_text|>" + self.opening(system, tools)
        if tools:
            asked = rest[0].content.strip() if rest and rest[0].role == "user" else None
            text += _turn("user", _tools_text(tools) + (asked or ""))
            rest = rest if asked is None else rest[1:]
        return text + self.turns(rest)

    def turns(self, messages: Sequence[Message]) -> str:
        return "".join(self.turn(message) for message in messages)

    def turn(self, message: Message) -> str:
        if message.role == "assistant":
            return self.generation_prompt(None) + self.answer(message)
        if message.role == "tool":
            return _turn("ipython", json.dumps(message.content, ensure_ascii=False))
        return _turn(message.role, message.content.strip())

    def generation_prompt(self, last: Message | None) -> str:
        return "<|start_header_id|>assistant<|end_header_id|>\n\n"

    def answer(self, message: Message) -> str:
        return llama3.render_calls(message) + _END

    def continuation(
        self, previous: Sequence[Message], stop: str | None, new: Sequence[Message], tools: Tools
    ) -> str:
        closing = "" if stop in self.stops else _END
        return closing + self.turns(new) + self.generation_prompt(None)

    def parse(self, text: str, tools: Tools = ()) -> Message:
        content, calls = llama3.parse_calls(text)
        return Message("assistant", content, calls)

    def settled(self, text: str) -> tuple[str, str]:
        return "", llama3.settled_content(text)


class Llama32(Llama3):
    """Llama 3.2: the system turn names the day on which it is rendered."""

    name = "llama3.2"

    def today(self) -> str:
        return datetime.now().strftime("%d %b %Y")


class Llama30(Llama3):
    """Llama 3: no system turn of its own, and no tools in the template."""

    name = "llama3.0"
    exceptions: Mapping[str, str] = {
        "tools_ignored": "the template knows no tools; they are written as Llama 3.1's does"
    }

    def opening(self, system: str | None, tools: Tools) -> str:
        return "" if system is None else _turn("system", system)
