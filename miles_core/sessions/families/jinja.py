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
_REFUSALS = (
    *(jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError),
    *(ArithmeticError, RecursionError),
)

# What templates ask of messages and schemas: roles, keys and types.
_KEYS = frozenset(
    (
        *("system", "developer", "user", "assistant", "tool", "function", "ipython", "model"),
        *("role", "content", "name", "id", "tool_calls", "tool_call_id", "reasoning_content"),
        *("reasoning", "thinking", "arguments", "parameters", "properties", "description"),
        *("type", "text", "image", "video", "audio", "image_url", "string", "integer", "number"),
        *("object", "array", "boolean", "null", "items", "required", "enum", "anyOf", "default"),
    )
)

PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "Probe it",
        "parameters": {
            "type": "object",
            "properties": {"probe": {"type": "string", "description": "what to probe"}},
            "required": ["probe"],
        },
    },
}
_CALL = Message("assistant", "", (ToolCall("probe", {"wanted": "value"}, "call00000"),))


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


def _environment() -> ImmutableSandboxedEnvironment:
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    return env


def _chosen(tokenizer: ChatTokenizer) -> dict[bool, str | None]:
    """The sources that render requests with tools (True) and without, as transformers chooses."""
    named = tokenizer.chat_templates()
    if not named:
        raise UserError(
            f"{tokenizer.directory} has no chat template", "Choose another --chat-family."
        )
    default = named.get("default")
    chosen = {False: default, True: named.get("tool_use", default)}
    if chosen[True] is None:
        raise UserError(
            f"of the chat templates of {tokenizer.directory} ({', '.join(sorted(named))}) none is "
            "`default`, so that a request does not say which one it means",
            "Name one of them `default`, or choose another --chat-family.",
        )
    return chosen


class OwnTemplate:
    """The template of a checkpoint; where it has one named `tool_use`, that renders where there
    are tools, and `default` elsewhere, as in Hugging Face's libraries.

    `variables` are set in it, as `chat_template_kwargs` of other servers are.
    """

    def __init__(
        self, tokenizer: ChatTokenizer, variables: Mapping[str, Any] | None = None
    ) -> None:
        """Raises UserError when the checkpoint has no template, or one that is no template."""
        self.sources = _chosen(tokenizer)
        env = _environment()
        try:
            compiled = {
                source: env.from_string(source)
                for source in {*self.sources.values()}
                if source is not None
            }
        except jinja2.TemplateError as error:
            raise UserError(
                f"the chat template of {tokenizer.directory} is no Jinja template: {error}",
                "Put the checkpoint's template right, or choose another --chat-family.",
            ) from error
        self._templates = {
            tools: compiled[source] for tools, source in self.sources.items() if source is not None
        }
        self.variables = dict(variables or {})
        self._tokens = {
            name: tokenizer.special_token(name) or "" for name in ("bos_token", "eos_token")
        }
        self._text_arguments = {False: False, True: False}
        self._final = ""
        for with_tools in self._templates:
            self._text_arguments[with_tools] = self._wants_text(with_tools)
        self._final = self._final_token()

    def render(
        self,
        messages: Sequence[Message],
        tools: Tools = (),
        generation_prompt: bool = False,
        now: datetime | None = None,
    ) -> str:
        """The text of a conversation at the time `now`; `MessageError` when it is refused.

        A token that ends the text alone, and not the last turn, is left out.
        """
        at = now or datetime.now()
        template = self._templates.get(bool(tools))
        if template is None:
            raise MessageError("the checkpoint has a chat template for requests with tools only")
        text_arguments = self._text_arguments[bool(tools)]
        try:
            text = template.render(
                messages=[_raw(message, text_arguments) for message in messages],
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=generation_prompt,
                strftime_now=at.strftime,
                **self._tokens,
                **self.variables,
            )
        except _REFUSALS as error:
            raise MessageError(f"the chat template refuses these messages: {error}") from error
        return text if generation_prompt else text.removesuffix(self._final)

    def _final_token(self) -> str:
        """The `eos_token`, where it ends a text without generation prompt and is no one's turn."""
        token = self._tokens["eos_token"]
        try:
            plain = self.render([Message("user", "q")])
            prompt = self.render([Message("user", "q")], (), True)
        except MessageError:
            return ""
        final = token and plain.endswith(token) and not prompt.startswith(plain)
        return token if final and prompt.startswith(plain.removesuffix(token)) else ""

    def _wants_text(self, with_tools: bool) -> bool:
        """Whether an object for a call's arguments is refused, or comes out as no JSON."""
        tools = (PROBE_TOOL,) if with_tools else ()
        result = Message("tool", "r", (), "", "call00000", "probe")
        messages = [Message("user", "q"), _CALL, result]
        try:
            return "'wanted'" in self.render(messages, tools)
        except MessageError:
            self._text_arguments[with_tools] = True
        try:
            self.render(messages, tools)
        except MessageError:
            return False
        return True


def _raw(message: Message, text_arguments: bool) -> dict[str, Any]:
    """A message as templates expect it; `text_arguments`: those of calls as JSON text."""
    raw = message.raw()
    if text_arguments:
        for call, plain in zip(raw.get("tool_calls", ()), message.tool_calls, strict=True):
            call["function"]["arguments"] = plain.arguments_json
    return raw


def literals(template: OwnTemplate) -> list[str]:
    """The texts that a template looks for: what it compares with, or gives to methods of texts.

    A message that holds one of them may be rendered differently from all others.
    """
    env = _environment()
    found: dict[str, None] = {}
    for source in dict.fromkeys(template.sources.values()):
        if source is None:
            continue
        parsed = env.parse(source)
        calls = [c for c in parsed.find_all(nodes.Call) if isinstance(c.node, nodes.Getattr)]
        for node in [*parsed.find_all(nodes.Compare), *calls]:
            values = [constant.value for constant in node.find_all(nodes.Const)]
            found |= dict.fromkeys(value for value in values if isinstance(value, str))
    return [text for text in found if text.strip() and text not in _KEYS]
