"""A checkpoint's own chat template, rendered as Hugging Face's libraries do."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from miles_core.errors import UserError
from miles_core.sessions.families.notation import Tools
from miles_core.sessions.messages import Message, MessageError, ToolCall
from miles_core.sessions.tokens import ChatTokenizer

# What a template of someone else's may end in when it meets messages that it was not made for.
_REFUSALS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError)

_CALL = Message("assistant", "", (ToolCall("f", {"probe": "value"}, "call00000"),))


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class _Generation(Extension):
    """`{% generation %}`, which marks the text of answers for training and writes nothing."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile(source: str) -> jinja2.Template:
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    return env.from_string(source)


class OwnTemplate:
    """The template of a checkpoint; `text_arguments`: it wants a call's arguments as JSON text.

    `variables` are set in it, as `chat_template_kwargs` of other servers are.
    """

    def __init__(
        self, tokenizer: ChatTokenizer, variables: Mapping[str, Any] | None = None
    ) -> None:
        """Raises UserError when the checkpoint has no template, or one that is no template."""
        source = tokenizer.chat_template()
        if source is None:
            raise UserError(
                f"{tokenizer.directory} has no chat template", "Choose another --chat-family."
            )
        try:
            self._template = _compile(source)
        except jinja2.TemplateError as error:
            raise UserError(
                f"the chat template of {tokenizer.directory} is no Jinja template: {error}",
                "Put the checkpoint's template right, or choose another --chat-family.",
            ) from error
        self.variables = dict(variables or {})
        self._tokens = {
            name: tokenizer.special_token(name) or "" for name in ("bos_token", "eos_token")
        }
        self.text_arguments = False
        self.text_arguments = self._wants_text()

    def render(
        self,
        messages: Sequence[Message],
        tools: Tools = (),
        generation_prompt: bool = False,
        now: datetime | None = None,
    ) -> str:
        """The text of a conversation at the time `now`; `MessageError` when it is refused."""
        at = now or datetime.now()
        try:
            return self._template.render(
                messages=[self._raw(message) for message in messages],
                tools=list(tools) or None,
                add_generation_prompt=generation_prompt,
                strftime_now=at.strftime,
                **self._tokens,
                **self.variables,
            )
        except _REFUSALS as error:
            raise MessageError(f"the chat template refuses these messages: {error}") from error

    def _raw(self, message: Message) -> dict[str, Any]:
        raw = message.raw()
        if self.text_arguments:
            for call, plain in zip(raw.get("tool_calls", ()), message.tool_calls, strict=True):
                call["function"]["arguments"] = plain.arguments_json
        return raw

    def _wants_text(self) -> bool:
        """Whether an object for a call's arguments is refused, or comes out as no JSON."""
        messages = [Message("user", "q"), _CALL, Message("tool", "r", (), "", "call00000", "f")]
        try:
            return "'probe'" in self.render(messages)
        except MessageError:
            self.text_arguments = True
        try:
            self.render(messages)
        except MessageError:
            return False
        return True
