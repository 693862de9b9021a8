"""A chat family: a notation over the tokenizer of one checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from miles_core.sessions.families.notation import Notation
from miles_core.sessions.messages import Message, parse_message, parse_messages
from miles_core.sessions.tokens import ChatTokenizer

ToolList = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class ChatFamily:
    """How a checkpoint turns messages into ids and ids into messages.

    Pure: any method may run in any thread. `messages` are OpenAI's dictionaries or `Message`s, ids
    are lists of ints. Methods that render raise `MessageError` for what has no form, and
    `NotAppendOnly` where a checkpoint's own template would rewrite what has been recorded.

    `stop_token_ids` end an answer; the first of them closes an answer that was cut off.
    """

    tokenizer: ChatTokenizer
    notation: Notation
    stop_token_ids: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.notation.name

    @property
    def end_of_turn_id(self) -> int:
        """The id that closes an answer which was cut off."""
        return self.stop_token_ids[0]

    def render_text(
        self, messages: Sequence[Any], tools: ToolList | None = None,
        add_generation_prompt: bool = True,
    ) -> str:  # fmt: skip
        """The text of a whole conversation."""
        plain = parse_messages(list(messages))
        if add_generation_prompt:
            return self.notation.prompt(plain, tools or ())
        return self.notation.conversation(plain, tools or ())

    def render_prompt(
        self, messages: Sequence[Any], tools: ToolList | None = None,
        add_generation_prompt: bool = True, limit: int | None = None,
    ) -> list[int]:  # fmt: skip
        """The ids of a whole conversation, ready for an answer of the assistant.

        Raises `TooManyTokens` for a long one with more than `limit` ids.
        """
        text = self.render_text(messages, tools, add_generation_prompt)
        return self.tokenizer.encode(text, limit)

    def continue_turn(
        self,
        previous: Sequence[Any],
        output_ids: Sequence[int],
        new: Sequence[Any],
        tools: ToolList | None = None,
        limit: int | None = None,
    ) -> list[int]:
        """The ids that follow an answer which was sampled as `output_ids`.

        They are the answer's end where it was cut off, what stands between turns, the messages
        `new`, and the generation prompt. `previous` are the messages up to that answer, which is
        the last of them. The cost does not depend on their number where `notation.local`. Raises
        `TooManyTokens` for a long text with more than `limit` ids.
        """
        if self.notation.local:
            previous = previous[-1:]
        before = [parse_message(item, "previous message") for item in previous]
        added = [parse_message(item, f"new message {i}") for i, item in enumerate(new)]
        stop = self.stop_of(output_ids)
        text = self.notation.continuation(before, stop, added, tools or ())
        return self.tokenizer.encode_after(stop or "", text, limit)

    def stop_of(self, output_ids: Sequence[int]) -> str | None:
        """The stop token of the notation that sampled ids end with, if they do."""
        if not output_ids or output_ids[-1] not in self.stop_token_ids:
            return None
        token = self.tokenizer.token_of(output_ids[-1])
        return token if token in self.notation.stops else None

    def render_output(self, message: Any) -> list[int]:
        """The ids that a model would answer `message` (an assistant's) with, end included."""
        text = self.notation.answer(parse_message(message, "message"))
        return self.tokenizer.encode_after(f"{self.notation.stops[0]}\n", text)

    def text_of(self, ids: Sequence[int]) -> str:
        """The text of sampled ids without the stop token at its end."""
        stopped = bool(ids) and ids[-1] in self.stop_token_ids
        return self.tokenizer.decode(ids[:-1] if stopped else ids)

    def parse_message(self, ids: Sequence[int], tools: ToolList | None = None) -> Message:
        """The assistant's message that ids stand for, which were sampled with `tools` at hand."""
        return self.notation.parse(self.text_of(ids), tools or ())

    def parse_output(self, ids: Sequence[int], tools: ToolList | None = None) -> dict[str, Any]:
        """As `parse_message`, in OpenAI's form: arguments are JSON text, calls have ids."""
        return openai_message(self.parse_message(ids, tools), "call")


def openai_message(message: Message, call_prefix: str) -> dict[str, Any]:
    """OpenAI's form of an answer; the calls' ids are `call_prefix` and a number."""
    out: dict[str, Any] = {"role": "assistant", "content": message.content or None}
    if message.reasoning_content:
        out["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        out["tool_calls"] = [
            {
                "id": f"{call_prefix}_{index}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments_json},
            }
            for index, call in enumerate(message.tool_calls)
        ]
    elif out["content"] is None:
        out["content"] = ""
    return out


def stop_ids(tokenizer: ChatTokenizer, notation: Notation) -> tuple[int, ...]:
    """The notation's stop tokens, then what the checkpoint itself names as the end of a text."""
    found = [tokenizer.id_of(token) for token in notation.stops]
    eos = tokenizer.generation_config.get("eos_token_id")
    found += eos if isinstance(eos, list) else [eos]
    named = tokenizer.special_token("eos_token")
    found.append(tokenizer.id_of(named) if named else None)
    return tuple(dict.fromkeys(i for i in found if i is not None))
