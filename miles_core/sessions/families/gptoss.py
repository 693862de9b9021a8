"""The notation of gpt-oss: harmony.

An answer may hold several messages; `<|end|>` between them is no stop. A call ends the answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime

from miles_core.sessions.families.notation import PromptByLast, Tools
from miles_core.sessions.messages import Message, ToolCall
from miles_core.sessions.parsers import gptoss
from miles_core.sessions.parsers.gptoss import CHANNEL, END, MESSAGE, START
from miles_core.sessions.parsers.text import json_text
from miles_core.sessions.parsers.typescript import render_namespace


def _turn(header: str, text: str) -> str:
    return f"{START}{header}{MESSAGE}{text}{END}"


class GptOss(PromptByLast):
    """gpt-oss-20b and -120b: a system turn of the notation itself, the client's system message as
    the developer's turn, tools in TypeScript.

    The system turn names a date: the day on which the notation was made, so that it does not
    change while a server runs.
    """

    name = "gpt-oss"
    tokens: tuple[str, ...] = (START, CHANNEL, MESSAGE, END, "<|constrain|>", gptoss.CALL)
    stops: tuple[str, ...] = (gptoss.RETURN, gptoss.CALL, "<|endoftext|>")
    local = True
    reasoning = True
    exceptions: Mapping[str, str] = {
        "no_call": "the template writes <|end|> for the <|return|> of an answer once another "
        "message follows; here what was sampled stays",
        "reasoning": "the template knows reasoning under another name, and drops that of answers "
        "before the last one without a call; here it stays",
        "several_calls": "the template drops all calls but the first; here each stands",
        "content_beside_call": "the template takes content beside a call for reasoning; here it is "
        "a message of the channel commentary",
        "all_in_one": "the template refuses content and reasoning beside a call; here all stand",
        "late_system": "the template drops a later system message; here it is a developer's turn",
        "late_tool_result": "the template refuses a result without a call; here it stands",
    }

    def __init__(self) -> None:
        self.date = datetime.now().strftime("%Y-%m-%d")

    def conversation(self, messages: Sequence[Message], tools: Tools) -> str:
        developer, rest = "", messages
        if messages and messages[0].role == "system":
            developer, rest = messages[0].content, messages[1:]
        opening = _turn("system", self._system_text(tools)) + self._developer(developer, tools)
        return opening + "".join(self._turns(rest, ()))

    def _system_text(self, tools: Tools) -> str:
        called = "\nCalls to these tools must go to the commentary channel: 'functions'."
        return (
            "You are ChatGPT, a large language model trained by OpenAI.\n"
            f"Knowledge cutoff: 2024-06\nCurrent date: {self.date}\n\nReasoning: medium\n\n"
            "# Valid channels: analysis, commentary, final. Channel must be included for every "
            f"message.{called if tools else ''}"
        )

    def _developer(self, instructions: str, tools: Tools) -> str:
        """The developer's turn, if there is anything in it."""
        text = f"# Instructions\n\n{instructions}\n\n" if instructions else ""
        if tools:
            text += "# Tools\n\n" + render_namespace("functions", tools)
        return _turn("developer", text) if text else ""

    def _turns(self, messages: Sequence[Message], calls: Sequence[ToolCall]) -> Iterator[str]:
        """The texts of messages, each to be put after the one before; `calls` are the latest."""
        answered = 0
        for message in messages:
            if message.role == "assistant":
                yield self.generation_prompt(None) + self.answer(message)
                calls, answered = message.tool_calls, 0
            elif message.role == "tool":
                name = _tool_name(message, calls, answered)
                header = f"functions.{name} to=assistant{CHANNEL}commentary"
                yield _turn(header, json_text(message.content))
                answered += 1
            elif message.role == "system":
                yield self._developer(message.content, ())
            else:
                yield _turn(message.role, message.content)

    def generation_prompt(self, last: Message | None) -> str:
        return gptoss.NEXT

    def answer(self, message: Message) -> str:
        return gptoss.render_answer(message)

    def continuation(
        self, previous: Sequence[Message], stop: str | None, new: Sequence[Message], tools: Tools
    ) -> str:
        closing = "" if stop in self.stops else self.stops[0]
        turns = "".join(self._turns(new, previous[-1].tool_calls))
        return closing + turns + self.generation_prompt(None)

    def parse(self, text: str, tools: Tools = ()) -> Message:
        return gptoss.parse_answer(text)

    def settled(self, text: str) -> tuple[str, str]:
        return gptoss.settled_answer(text)


def _tool_name(result: Message, calls: Sequence[ToolCall], answered: int) -> str:
    """The name of the tool that gave `result`, the first after `answered` others to `calls`.

    It is that of the call with the result's id; else the result says it; else their order does.
    """
    for call in calls:
        if result.tool_call_id and call.id == result.tool_call_id:
            return call.name
    if result.name:
        return result.name
    return calls[min(answered, len(calls) - 1)].name if calls else "tool"
