"""The notations of Qwen3.5 and 3.6: calls in XML, and a prompt that opens the reasoning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from miles_core.sessions.families.chatml import END, START, ChatMl
from miles_core.sessions.families.notation import Tools
from miles_core.sessions.messages import Message
from miles_core.sessions.parsers.qwen_xml import QwenXml, render_calls
from miles_core.sessions.parsers.reasoning import take_reasoning
from miles_core.sessions.parsers.text import json_text

_OLD_ANSWER = (
    "the template drops the reasoning, also an empty one, of an answer once a user message "
    "follows, which would rewrite what was sampled; here it stays"
)


def _tools_text(tools: Tools) -> str:
    listed = "".join(f"\n{json_text(tool)}" for tool in tools)
    return (
        "# Tools\n\nYou have access to the following functions:\n\n"
        f"<tools>{listed}\n</tools>\n\nIf you choose to call a function ONLY reply in the "
        "following format with NO suffix:\n\n<tool_call>\n<function=example_function_name>\n"
        "<parameter=example_parameter_1>\nvalue_1\n</parameter>\n<parameter=example_parameter_2>\n"
        "This is the value for the second parameter\nthat can span\nmultiple lines\n</parameter>\n"
        "</function>\n</tool_call>\n\n<IMPORTANT>\nReminder:\n- Function calls MUST follow the "
        "specified format: an inner <function=...></function> block must be nested within "
        "<tool_call></tool_call> XML tags\n- Required parameters MUST be specified\n- You may "
        "provide optional reasoning for your function call in natural language BEFORE the function "
        "call, but NOT after\n- If there is no function call available, answer the question like "
        "normal with your current knowledge and do not tell the user about function calls\n"
        "</IMPORTANT>"
    )


class Qwen35(ChatMl):
    """Qwen3.5 that thinks: the generation prompt opens the reasoning.

    White space at the ends of messages is taken off.
    """

    name = "qwen3.5"
    reasoning = True
    exceptions: Mapping[str, str] = {"old_answer": _OLD_ANSWER}
    opening = "<think>\n"
    """What the generation prompt writes of an answer's reasoning."""
    as_python = True
    """Whether arguments that are neither text nor collections are written as in Python."""
    _reader = QwenXml(opened=True)

    def conversation(self, messages: Sequence[Message], tools: Tools) -> str:
        system, rest = None, messages
        if messages and messages[0].role == "system":
            system, rest = messages[0].content.strip(), messages[1:]
        if tools:
            system = _tools_text(tools) + (f"\n\n{system}" if system else "")
        opening = "" if system is None else f"{START}system\n{system}{END}\n"
        return opening + "".join(self.turns(rest))

    def turns(self, messages: Sequence[Message]) -> Iterator[str]:
        return super().turns([replace(m, content=m.content.strip()) for m in messages])

    def generation_prompt(self, last: Message | None) -> str:
        return f"{START}assistant\n{self.opening}"

    def answer(self, message: Message) -> str:
        message = take_reasoning(message)
        reasoning = f"{message.reasoning_content.strip()}\n</think>\n\n" if self.reasoning else ""
        return reasoning + render_calls(message, self.as_python) + END

    def parse(self, text: str, tools: Tools = ()) -> Message:
        return self._reader.parse(text, tools)

    def settled(self, text: str) -> tuple[str, str]:
        return self._reader.settled(text)


class Qwen36(Qwen35):
    """Qwen3.6, whose arguments are JSON where they are no text."""

    name = "qwen3.6"
    as_python = False


class Qwen35NoThink(Qwen35):
    """Qwen3.5 that does not think: the generation prompt holds an empty reasoning."""

    name = "qwen3.5-nothink"
    reasoning = False
    opening = "<think>\n\n</think>\n\n"
    exceptions: Mapping[str, str] = {
        "old_answer": _OLD_ANSWER,
        "reasoning": "the template has a form for reasoning, which these models do not sample",
    }
    _reader = QwenXml(opened=False)
