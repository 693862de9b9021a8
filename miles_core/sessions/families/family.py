"""Chat families: how a kind of checkpoint turns messages into ids and ids into messages.

A family bundles a chat template, the parser of tool calls, the stop tokens and the junction between
turns. The families `qwen3`, `chatml` and `terse` use templates of this package, which render
each message without looking at the ones before it, so that a conversation only ever grows at its
end. `template` uses the checkpoint's own template and proves that property at each turn.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from miles_core.errors import UserError
from miles_core.sessions.hermes import parse_answer
from miles_core.sessions.messages import Message, MessageError, parse_messages
from miles_core.sessions.tokens import ChatTokenizer

TEMPLATES = Path(__file__).parents[1] / "templates"
# Family -> template of this package; None is the checkpoint's own.
FAMILIES: dict[str, str | None] = {
    "qwen3": "hermes.jinja",
    "chatml": "hermes.jinja",
    "terse": "terse.jinja",
    "template": None,
}
_PROBE = "PROBE"


class NotAppendOnly(Exception):
    """The template renders the recorded part of a conversation differently once it goes on."""


def _compile(source: str) -> jinja2.Template:
    """A chat template with the functions that such templates rely on."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)

    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return env.from_string(source)


@dataclass(frozen=True)
class ChatFamily:
    """A chat family over one tokenizer. All methods are pure and may run in any thread.

    `messages` are OpenAI's dictionaries or `Message`s; ids are lists of ints.
    """

    name: str
    tokenizer: ChatTokenizer
    template: jinja2.Template
    own_template: bool
    stop_token_ids: tuple[int, ...]
    end_of_turn_id: int

    def render_text(
        self,
        messages: Sequence[Any],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The text of a conversation; raises `MessageError` when the template refuses it."""
        plain = parse_messages(list(messages))
        try:
            return self.template.render(
                messages=plain if self.own_template else [m.raw() for m in plain],
                tools=tools or None,
                add_generation_prompt=add_generation_prompt,
                bos_token=self.tokenizer.special_token("bos_token") or "",
                eos_token=self.tokenizer.special_token("eos_token") or "",
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise MessageError(f"the chat template refuses these messages: {error}") from error

    def render_prompt(
        self,
        messages: Sequence[Any],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """The ids of a conversation, ready for an answer of the assistant."""
        return self.tokenizer.encode(self.render_text(messages, tools, add_generation_prompt))

    def render_suffix(
        self,
        prev_messages: Sequence[Any],
        new_messages: Sequence[Any],
        tools: list[dict[str, Any]] | None = None,
    ) -> list[int]:
        """The ids that follow a recorded turn, whose last id is the end-of-turn token.

        `prev_messages` end with that turn's answer. The ids hold what the template puts after the
        end of a turn, the new messages, and the generation prompt. Raises `NotAppendOnly` when a
        checkpoint's own template would now render the prompt of that turn differently.
        """
        asked = ""
        if self.own_template:
            prev_messages, tools = [Message("assistant")], None
        else:
            asked = self.render_text(prev_messages[:-1], tools)
        before = self.render_text(prev_messages, tools, add_generation_prompt=False)
        after = self.render_text([*prev_messages, *new_messages], tools)
        end = self.tokenizer.token_of(self.end_of_turn_id) or ""
        cut = before.rfind(end) + len(end)
        kept = after.startswith(asked) and after.startswith(before[:cut])
        if end not in before or not kept:
            raise NotAppendOnly(f"the template of family {self.name!r} rewrites earlier turns")
        return self.tokenizer.encode(after[cut:])

    def join(self, output_ids: Sequence[int], suffix: list[int]) -> list[int]:
        """`suffix` as it has to follow an answer: one that was cut off first gets its end."""
        if output_ids and output_ids[-1] == self.end_of_turn_id:
            return suffix
        return [self.end_of_turn_id, *suffix]

    def render_output(self, message: Any) -> list[int]:
        """The ids that a model would answer `message` (an assistant's) with, end included."""
        prompt = self.render_text([{"role": "user", "content": ""}])
        whole = self.render_text([{"role": "user", "content": ""}, message], None, False)
        if not whole.startswith(prompt):
            raise NotAppendOnly(f"family {self.name!r} has no canonical form of an answer")
        end = self.tokenizer.token_of(self.end_of_turn_id) or ""
        return self.tokenizer.encode(whole[len(prompt) : whole.rfind(end) + len(end)])

    def parse_message(self, ids: Sequence[int]) -> Message:
        """The assistant's message that sampled `ids` stand for."""
        ids = list(ids)
        if ids and ids[-1] in self.stop_token_ids:
            ids.pop()
        return parse_answer(self.tokenizer.decode(ids))

    def parse_output(self, ids: Sequence[int]) -> dict[str, Any]:
        """As `parse_message`, in OpenAI's form: arguments are JSON text, calls have ids."""
        return openai_message(self.parse_message(ids), "call")


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


def choose_family(tokenizer: ChatTokenizer) -> str:
    """The family of a checkpoint, from its marker, its special tokens and its template."""
    marker = tokenizer.config.get("miles_chat_family")
    if marker is not None:
        return str(marker)
    chatml = None not in (tokenizer.id_of("<|im_start|>"), tokenizer.id_of("<|im_end|>"))
    own = tokenizer.chat_template() or ""
    if chatml and "<tool_call>" in own and "<tool_response>" in own and "<function=" not in own:
        return "qwen3"
    if chatml and ("<tool_call>" not in own or not own):
        return "chatml"
    if own:
        return "template"
    raise UserError(
        f"{tokenizer.directory} has neither a chat template nor ChatML tokens",
        f"Name its family with --chat-family ({', '.join(FAMILIES)}).",
    )


def load_family(tokenizer_dir: Path | str, name: str = "auto") -> ChatFamily:
    """The family `name` (or the one that fits) over the tokenizer of a checkpoint."""
    tokenizer = ChatTokenizer(tokenizer_dir)
    if name == "auto":
        name = choose_family(tokenizer)
    if name not in FAMILIES:
        raise UserError(f"unknown chat family {name!r}", f"Known: auto, {', '.join(FAMILIES)}.")
    file = FAMILIES[name]
    if file is None:
        return _own_family(tokenizer)
    end = tokenizer.id_of("<|im_end|>")
    if end is None or tokenizer.id_of("<|im_start|>") is None:
        raise UserError(
            f"chat family {name!r} needs <|im_start|> and <|im_end|> in {tokenizer.directory}",
            "Use --chat-family template for a checkpoint with another notation.",
        )
    template = _compile((TEMPLATES / file).read_text("utf-8"))
    return ChatFamily(name, tokenizer, template, True, _stop_ids(tokenizer, end), end)


def _stop_ids(tokenizer: ChatTokenizer, end_of_turn: int) -> tuple[int, ...]:
    """The end-of-turn token, and what the checkpoint itself names as the end of a text."""
    stops = {end_of_turn}
    eos = tokenizer.generation_config.get("eos_token_id")
    stops.update(eos if isinstance(eos, list) else [] if eos is None else [eos])
    named = tokenizer.special_token("eos_token")
    token = tokenizer.id_of(named) if named else None
    if token is not None:
        stops.add(token)
    return tuple(sorted(stops))


def _own_family(tokenizer: ChatTokenizer) -> ChatFamily:
    """Family `template`: the end of a turn is what the template puts after an answer."""
    source = tokenizer.chat_template()
    if source is None:
        raise UserError(
            f"{tokenizer.directory} has no chat template", "Choose another --chat-family."
        )
    family = ChatFamily("template", tokenizer, _compile(source), False, (), -1)
    probe = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": _PROBE}]
    tail = family.render_text(probe, None, False).rpartition(_PROBE)[2]
    ids = tokenizer.encode(tail.lstrip())
    end = ids[0] if ids else -1
    if not tokenizer.is_added(end):
        raise UserError(
            f"the chat template of {tokenizer.directory} ends an answer with {tail!r}, "
            "which does not begin with a token of its own",
            "Choose another --chat-family.",
        )
    return ChatFamily("template", tokenizer, family.template, False, _stop_ids(tokenizer, end), end)
