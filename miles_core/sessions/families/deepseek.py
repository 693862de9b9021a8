"""The notation of DeepSeek-V3 and DeepSeek-V3-0324.

The template of these checkpoints takes no tools, and none of DeepSeek's documents gives a form for
them. Here they follow the system message, each as the JSON of its definition, with the form that a
call has. After the results of tools an answer begins at once: there is no generation prompt, and
`<｜Assistant｜>` does not stand between.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from miles_core.sessions.families.notation import PromptByLast, Tools
from miles_core.sessions.messages import Message, ToolCall
from miles_core.sessions.parsers import deepseek
from miles_core.sessions.parsers.text import json_text

_BEGIN, _END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
_USER, _ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
_OUTPUTS, _OUTPUTS_END = "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"
_OUTPUT, _OUTPUT_END = "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"
_LATE_SYSTEM = "the template moves a later system message to the front; here it is a user's turn"


def _tools_text(tools: Tools) -> str:
    """The part of the system message that describes tools."""
    form = deepseek.render_calls(
        Message("assistant", "", (ToolCall("NAME", {"ARGUMENT": "VALUE"}),))
    )
    listed = "".join(f"\n```json\n{json_text(tool)}\n```\n" for tool in tools)
    return (
        "# Tools\n\nThese functions can be called. Each is given as JSON, its parameters as a "
        f"JSON schema.\n{listed}\nA call ends the answer and has this form, the arguments in one "
        f"JSON object; several calls stand one after the other:\n{form}"
    )


class DeepSeekV3(PromptByLast):
    """DeepSeek-V3: a token before each turn, and one after each answer."""

    name = "deepseek-v3"
    tokens: tuple[str, ...] = (
        *(_BEGIN, _USER, _ASSISTANT, _OUTPUTS, _OUTPUTS_END, _OUTPUT, _OUTPUT_END),
        *(deepseek.START, deepseek.END, deepseek.CALL, deepseek.CALL_END, deepseek.SEPARATOR),
    )
    stops: tuple[str, ...] = (_END,)
    local = True
    reasoning = False
    exceptions: Mapping[str, str] = {
        "tools_ignored": "the template takes no tools; they follow the system message",
        "call": "the template does not end the section of a single call, and writes it twice with "
        "more than two; here it is ended once",
        "content_beside_call": "the template drops the calls beside content; here both stay",
        "tool_result": "after its first results of tools the template no longer opens their "
        "section, and it closes it only before an answer without calls; here both are always there",
        "late_system": _LATE_SYSTEM,
    }

    def conversation(self, messages: Sequence[Message], tools: Tools) -> str:
        count = next((i for i, m in enumerate(messages) if m.role != "system"), len(messages))
        system = [message.content for message in messages[:count]]
        if tools:
            system.append(_tools_text(tools))
        return _BEGIN + "\n\n".join(system) + "".join(self._turns(messages[count:]))

    def _turns(self, messages: Sequence[Message]) -> Iterator[str]:
        """The texts of messages, each to be put after the one before."""
        last: Message | None = None
        for message in messages:
            if last is not None and last.role == "tool" and message.role != "tool":
                yield _OUTPUTS_END
            if message.role == "assistant":
                yield self.generation_prompt(last) + self.answer(message)
            elif message.role == "tool":
                yield "\n" if last is not None and last.role == "tool" else _OUTPUTS
                yield f"{_OUTPUT}{message.content}{_OUTPUT_END}"
            else:
                yield _USER + message.content
            last = message
        if last is not None and last.role == "tool":
            yield _OUTPUTS_END

    def generation_prompt(self, last: Message | None) -> str:
        return "" if last is not None and last.role == "tool" else _ASSISTANT

    def answer(self, message: Message) -> str:
        return deepseek.render_calls(message) + _END

    def continuation(
        self, previous: Sequence[Message], stop: str | None, new: Sequence[Message], tools: Tools
    ) -> str:
        closing = "" if stop in self.stops else _END
        last = new[-1] if new else previous[-1]
        return closing + "".join(self._turns(new)) + self.generation_prompt(last)

    def parse(self, text: str, tools: Tools = ()) -> Message:
        content, calls = deepseek.parse_calls(text)
        return Message("assistant", content, calls)

    def settled(self, text: str) -> tuple[str, str]:
        return "", deepseek.settled_content(text)
