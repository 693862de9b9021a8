"""ChatML, with tools in the notation of the Hermes and Qwen models; and its plain relatives."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from miles_core.sessions.families.notation import PromptByLast, Tools
from miles_core.sessions.messages import Message
from miles_core.sessions.parsers import hermes
from miles_core.sessions.parsers.reasoning import (
    render_reasoning,
    settled_reasoning,
    split_reasoning,
    take_reasoning,
)

START = "<|im_start|>"
END = "<|im_end|>"
_NO_TOOLS = {"tools_ignored": "the template knows no tools; they are written as Qwen's do"}


def tools_text(tools: Tools) -> str:
    """The part of a system message that describes tools, one JSON object a line."""
    listed = "".join(f"\n{json.dumps(tool, ensure_ascii=False)}" for tool in tools)
    return (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
        f"{listed}\n</tools>\n\nFor each function call, return a json object with function name "
        "and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n"
        '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    )


class ChatMl(PromptByLast):
    """`<|im_start|>role`, a line break, the text, `<|im_end|>`, a line break.

    Results of tools that follow one another share a turn of the user.
    """

    name = "chatml"
    tokens: tuple[str, ...] = (START, END)
    stops: tuple[str, ...] = (END,)
    local = True
    reasoning = False
    exceptions: Mapping[str, str] = _NO_TOOLS
    default_system: str | None = None
    """System message of a conversation that has none."""

    def conversation(self, messages: Sequence[Message], tools: Tools) -> str:
        system, rest = self.default_system, messages
        if messages and messages[0].role == "system":
            system, rest = messages[0].content, messages[1:]
        if tools:
            before = "" if system is None else f"{system}\n\n"
            system = before + tools_text(tools)
        opening = "" if system is None else f"{START}system\n{system}{END}\n"
        return opening + "".join(self.turns(rest))

    def turns(self, messages: Sequence[Message]) -> Iterator[str]:
        """The texts of messages after the opening, each to be put after the one before."""
        last = len(messages) - 1
        for index, message in enumerate(messages):
            if message.role == "assistant":
                yield f"{self.generation_prompt(None)}{self.answer(message)}\n"
            elif message.role == "tool":
                if not index or messages[index - 1].role != "tool":
                    yield f"{START}user"
                yield f"\n<tool_response>\n{message.content}\n</tool_response>"
                if index == last or messages[index + 1].role != "tool":
                    yield f"{END}\n"
            else:
                yield f"{START}{message.role}\n{message.content}{END}\n"

    def generation_prompt(self, last: Message | None) -> str:
        return f"{START}assistant\n"

    def answer(self, message: Message) -> str:
        return hermes.render_calls(message) + END

    def continuation(
        self, previous: Sequence[Message], stop: str | None, new: Sequence[Message], tools: Tools
    ) -> str:
        closing = "" if stop == END else END
        return f"{closing}\n{''.join(self.turns(new))}{self.generation_prompt(None)}"

    def parse(self, text: str, tools: Tools = ()) -> Message:
        content, calls = hermes.parse_calls(text)
        return Message("assistant", content, calls)

    def settled(self, text: str) -> tuple[str, str]:
        return "", hermes.settled_content(text)


class SmolLm2(ChatMl):
    """SmolLM2, whose template gives a conversation a system message when it has none."""

    name = "smollm2"
    default_system: str | None = (
        "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    )


class Thinking(ChatMl):
    """ChatML of models that may think before they answer, between <think> and </think>."""

    reasoning = True
    opened = False
    """Whether the generation prompt opens the reasoning, so that an answer begins inside of it."""

    def generation_prompt(self, last: Message | None) -> str:
        return f"{START}assistant\n" + ("<think>\n" if self.opened else "")

    def answer(self, message: Message) -> str:
        message = take_reasoning(message)
        body = hermes.render_calls(message) + END
        reasoning = message.reasoning_content.strip("\n")
        if self.opened:
            return render_reasoning(reasoning).removeprefix("<think>\n") + body.lstrip("\n")
        return render_reasoning(reasoning) + body.lstrip("\n") if reasoning else body

    def parse(self, text: str, tools: Tools = ()) -> Message:
        reasoning, rest = split_reasoning(text, self.opened)
        content, calls = hermes.parse_calls(rest)
        return Message("assistant", content, calls, reasoning)

    def settled(self, text: str) -> tuple[str, str]:
        reasoning, rest = settled_reasoning(text, self.opened)
        return reasoning, "" if rest is None else hermes.settled_content(rest)
