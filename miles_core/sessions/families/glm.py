"""The notations of GLM-4.5 and later.

A turn begins with a token of its role and has no end: the token that opens the next turn is what
an answer stops with. `<|user|>` and `<|observation|>` are therefore sampled, and not written again
when the turn they announce follows. When another one follows, the sampled token stays, as all that
was sampled, and the opening token of that turn comes after it; so it does after `<|endoftext|>`.
The templates, which do not know what was sampled, have the opening token alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from miles_core.sessions.families.notation import PromptByLast, Tools
from miles_core.sessions.messages import Message
from miles_core.sessions.parsers import glm
from miles_core.sessions.parsers.reasoning import (
    settled_reasoning,
    split_reasoning,
    take_reasoning,
)
from miles_core.sessions.parsers.text import json_text

_OPENERS = {
    "system": "<|system|>",
    "user": "<|user|>",
    "assistant": "<|assistant|>",
    "tool": "<|observation|>",
}
_LATE = "the user's turn, which the answer before has announced, gives way: its token stays"
_NO_RESULT = "the result, which the answer before has announced, gives way: its token stays"
_OLD_REASONING = (
    "the template drops an answer's reasoning once a user message follows, which would rewrite "
    "what was sampled; here it stays"
)


class Glm45(PromptByLast):
    """GLM-4.5 and GLM-4.6: a line break before each part. An answer opens its reasoning itself."""

    name = "glm45"
    tokens: tuple[str, ...] = ("[gMASK]", "<sop>", *_OPENERS.values())
    stops: tuple[str, ...] = ("<|user|>", "<|observation|>", "<|endoftext|>")
    local = True
    reasoning = True
    exceptions: Mapping[str, str] = {
        "old_reasoning": _OLD_REASONING,
        "late_system": _LATE,
        "late_tool_result": _LATE,
        "user_after_call": _NO_RESULT,
    }
    line = "\n"
    """What stands between the parts of a turn."""
    opened = False
    """Whether the generation prompt opens the reasoning, so that an answer begins inside of it."""

    def conversation(self, messages: Sequence[Message], tools: Tools) -> str:
        opening = "[gMASK]<sop>" + (self._tools_text(tools) if tools else "")
        return opening + "".join(self._turns(messages))

    def _tools_text(self, tools: Tools) -> str:
        listed = "".join(f"{json_text(tool)}\n" for tool in tools)
        pairs = "".join(
            f"<arg_key>{{arg-key-{n}}}</arg_key>{self.line}"
            f"<arg_value>{{arg-value-{n}}}</arg_value>{self.line}"
            for n in (1, 2)
        )
        return (
            "<|system|>\n# Tools\n\nYou may call one or more functions to assist with the user "
            "query.\n\nYou are provided with function signatures within <tools></tools> XML tags:\n"
            f"<tools>\n{listed}</tools>\n\nFor each function call, output the function name and "
            "arguments within the following XML format:\n"
            f"<tool_call>{{function-name}}{self.line}{pairs}...{self.line}</tool_call>"
        )

    def _turns(self, messages: Sequence[Message]) -> Iterator[str]:
        """The texts of messages, each to be put after the one before."""
        before, announced = "", ""
        for message in messages:
            role, line = message.role, self.line
            opener = "" if role == before == "tool" else _OPENERS[role]
            yield opener if announced in ("", opener) else announced + opener
            if role == "assistant":
                yield self._answer_text(message)
            elif role == "tool":
                yield f"{line}<tool_response>{line}{message.content}{line}</tool_response>"
            else:
                yield line + message.content
            before, announced = role, self._stop(message) if role == "assistant" else ""

    def _stop(self, answer: Message) -> str:
        """The token that an answer ends with, which announces results of its calls or the user."""
        return _OPENERS["tool" if answer.tool_calls else "user"]

    def _answer_text(self, message: Message) -> str:
        """What stands between the token of the assistant and that of the next turn."""
        message = take_reasoning(message)
        thought = f"<think>{message.reasoning_content.strip()}</think>"
        return self.line + thought + glm.render_answer(message, self.line)

    def generation_prompt(self, last: Message | None) -> str:
        return _OPENERS["assistant"] + ("<think>" if self.opened else "")

    def answer(self, message: Message) -> str:
        text = self._answer_text(message)
        return (text.removeprefix("<think>") if self.opened else text) + self._stop(message)

    def continuation(
        self, previous: Sequence[Message], stop: str | None, new: Sequence[Message], tools: Tools
    ) -> str:
        text = "".join(self._turns(new)) + self.generation_prompt(None)
        if stop is None:
            return text if text.startswith(self.stops) else self.stops[0] + text
        return text.removeprefix(stop)

    def parse(self, text: str, tools: Tools = ()) -> Message:
        reasoning, rest = split_reasoning(text, self.opened)
        content, calls = glm.parse_calls(rest, tools)
        return Message("assistant", content, calls, reasoning)

    def settled(self, text: str) -> tuple[str, str]:
        reasoning, rest = settled_reasoning(text, self.opened)
        return reasoning, "" if rest is None else glm.settled_content(rest)


class Glm47(Glm45):
    """GLM-4.7 and GLM-5: no line breaks, and the generation prompt opens the reasoning."""

    name = "glm47"
    line = ""
    opened = True
    exceptions: Mapping[str, str] = {
        "old_reasoning": f"{_OLD_REASONING}, as with the template's own clear_thinking=False",
        "late_system": _LATE,
        "late_tool_result": _LATE,
        "user_after_call": _NO_RESULT,
        "no_reasoning": "the template writes </think> alone before an answer without reasoning; "
        "the generation prompt has opened the reasoning, so that <think></think> is there",
    }
