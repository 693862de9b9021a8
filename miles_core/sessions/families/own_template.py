"""The notation `template`: whatever a checkpoint's own template writes, if it only ever appends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Protocol

from miles_core.errors import UserError
from miles_core.sessions.families.family import stop_ids
from miles_core.sessions.families.jinja import PROBE_TOOL, OwnTemplate
from miles_core.sessions.families.notation import NotAppendOnly, Notation, Tools
from miles_core.sessions.messages import Message, MessageError, ToolCall
from miles_core.sessions.parsers.qwen_xml import QwenXml
from miles_core.sessions.tokens import ChatTokenizer

_USER = Message("user", "question")
_PROBE = "PROBE"
_ARGUMENT = "some words"
_CALL = Message(
    "assistant",
    "",
    (ToolCall("probe", {"number": 1, "flag": True, "text": _ARGUMENT}, "call00000"),),
)
_CALLS = replace(_CALL, tool_calls=(*_CALL.tool_calls, *_CALL.tool_calls))
_THINKING = Message("assistant", _PROBE, (), "thought")
_SHAPES = {
    "words": Message("assistant", _PROBE),
    "words after reasoning": _THINKING,
    "a call": _CALL,
    "two calls": _CALLS,
    "a call beside words": replace(_CALL, content=_PROBE),
    "a call after reasoning": replace(_CALL, reasoning_content="thought"),
    "words, reasoning and two calls": replace(_CALLS, content=_PROBE, reasoning_content="thought"),
}
_UNREAD = {"call": "the template writes no calls, or none in a form that is known"}


class Reader(Protocol):
    """Reads answers, as a notation does."""

    @property
    def name(self) -> str: ...

    def parse(self, text: str, tools: Tools = ()) -> Message: ...

    def settled(self, text: str) -> tuple[str, str]: ...


class TemplateNotation:
    """Renders by a checkpoint's template, and reads answers by the parser that understands it.

    Where `local`, a continuation is rendered after a short stand-in for the conversation, whose
    last message is the real answer; else after the conversation itself, of which it is checked
    that it still is what it was.
    """

    name = "template"
    tokens: tuple[str, ...] = ()

    def __init__(
        self,
        template: OwnTemplate,
        stops: tuple[str, ...],
        reader: Reader | None,
        local: bool = False,
    ) -> None:
        self.template, self.stops, self.reader, self.local = template, stops, reader, local
        self.exceptions: Mapping[str, str] = {} if reader else _UNREAD
        if template.variables:
            set_to = ", ".join(f"{key}={value}" for key, value in template.variables.items())
            reason = f"the template drops reasoning once a user message follows; here {set_to}"
            self.exceptions = {**self.exceptions, "old_answer": reason}
        self._always = self._text_of_next_answer()
        self._needs_tools = not self._writes_calls(()) and self._writes_calls((PROBE_TOOL,))
        self.reasoning = self._keeps_reasoning()

    def _text_of_next_answer(self) -> str:
        """The generation prompt of a template that writes it whether it is asked to or not."""
        text = self.template.render([_USER])
        if text != self.template.render([_USER], (), True):
            return ""
        return text[max(text.rfind(stop) + len(stop) for stop in self.stops) :]

    def _writes_calls(self, tools: Tools) -> bool:
        """Whether an answer's call is written where a request has these tools."""
        try:
            return _ARGUMENT in self.template.render([_USER, _CALL], tools)
        except MessageError:
            return False

    def _keeps_reasoning(self) -> bool:
        """Whether the template writes the reasoning of an answer, and the reader finds it."""
        if self.reader is None:
            return False
        try:
            text = self.answer(_THINKING)
        except (MessageError, NotAppendOnly):
            return False
        return self.reader.parse(text.removesuffix(self.stops[0])) == _THINKING

    def conversation(self, messages: Sequence[Message], tools: Tools) -> str:
        return self._render(messages, tools, False)

    def prompt(self, messages: Sequence[Message], tools: Tools) -> str:
        return self._render(messages, tools, True)

    def _render(
        self, messages: Sequence[Message], tools: Tools, prompt: bool, now: datetime | None = None
    ) -> str:
        if self._needs_tools and not tools and any(message.tool_calls for message in messages):
            raise MessageError(
                "the chat template leaves calls out where a request has no tools: send the tools "
                "with every request"
            )
        return self.template.render(messages, tools, prompt, now)

    def answer(self, message: Message) -> str:
        tools = stand_in(message)
        prompt = self.template.render([_USER], tools, True)
        whole = self.template.render([_USER, message], tools)
        if not whole.startswith(prompt):
            raise NotAppendOnly("an answer does not begin with the generation prompt")
        end = self.answer_end(whole, len(prompt))
        return whole[len(prompt) : end]

    def answer_end(self, text: str, after: int) -> int:
        """Where the answer that `text` ends with ends, its stop token included."""
        ends = [(text.rfind(stop, after), len(stop)) for stop in self.stops]
        at, size = max(ends)
        rest = text[at + size :]
        if at < 0 or (rest.strip() and rest != self._always):
            raise NotAppendOnly("an answer does not end with a stop token")
        return at + size

    def continuation(
        self, previous: Sequence[Message], stop: str | None, new: Sequence[Message], tools: Tools
    ) -> str:
        if not self.local:
            return self._continued(previous, stop, new, tools)
        tools = (PROBE_TOOL,) if tools else ()
        try:
            return self._continued([_USER, previous[-1]], stop, new, tools)
        except MessageError:
            # A template may refuse an answer, such as one with several calls, and yet be able to
            # say what stands after it.
            plain = _CALL if previous[-1].tool_calls else Message("assistant", _PROBE)
            return self._continued([_USER, plain], stop, new, tools)

    def _continued(
        self, previous: Sequence[Message], stop: str | None, new: Sequence[Message], tools: Tools
    ) -> str:
        now = datetime.now()
        asked = self._render(previous[:-1], tools, True, now)
        before = self._render(previous, tools, False, now)
        after = self._render([*previous, *new], tools, True, now)
        if not before.startswith(asked):
            raise NotAppendOnly("an answer does not follow the generation prompt")
        cut = self.answer_end(before, len(asked))
        if not after.startswith(before[:cut]):
            raise NotAppendOnly("the template rewrites earlier messages")
        return ("" if stop in self.stops else self.stops[0]) + after[cut:]

    def parse(self, text: str, tools: Tools = ()) -> Message:
        return self.reader.parse(text, tools) if self.reader else Message("assistant", text)

    def settled(self, text: str) -> tuple[str, str]:
        return self.reader.settled(text) if self.reader else ("", text)


def stand_in(message: Message) -> Tools:
    """Tools for a conversation in which `message` stands alone: calls have something to call."""
    return (PROBE_TOOL,) if message.tool_calls else ()


def find_stops(tokenizer: ChatTokenizer, template: OwnTemplate) -> tuple[str, ...]:
    """The tokens that a template ends answers with: first that of words, then those of calls.

    Each is the last thing of an answer that is no white space, and stands nowhere else in one.
    """
    always = template.render([_USER]) == template.render([_USER], (), True)
    ends: dict[str, str] = {}
    for shape, message in _SHAPES.items():
        tail = _tail(template, message)
        if tail is None and ends:
            continue
        # Where a generation prompt follows in any case, it is known what ends words alone.
        if always and ends and next(iter(ends)) in (tail or ""):
            continue
        stop = _end_token(tokenizer, tail or "", first=always)
        if stop is None:
            raise UserError(
                f"the chat template of {tokenizer.directory} ends an answer of {shape} with "
                f"{tail!r}, which is no token of its own at the end",
                "Choose another --chat-family.",
            )
        ends.setdefault(stop, shape)
    return tuple(ends)


def _tail(template: OwnTemplate, message: Message) -> str | None:
    """What follows the last words of an answer; None where the template does not write them."""
    last = _ARGUMENT if message.tool_calls else _PROBE
    try:
        text = template.render([_USER, message], stand_in(message))
    except MessageError:
        if message == _SHAPES["words"]:
            raise
        return None
    _, said, tail = text.rpartition(last)
    return tail if said else None


def _end_token(tokenizer: ChatTokenizer, text: str, first: bool) -> str | None:
    """The token of its own that a text ends (`first`: begins) with, but for white space."""
    ids = tokenizer.encode(text)
    for token_id in ids if first else reversed(ids):
        if tokenizer.decode([token_id]).strip():
            return tokenizer.token_of(token_id) if tokenizer.is_added(token_id) else None
    return None


def inner_stop(answer: str, stops: Sequence[str]) -> str | None:
    """A stop token before the end of an answer, where an engine would end it."""
    return next((s for s in stops if 0 <= answer.find(s) < len(answer) - len(s)), None)


def find_reader(
    template: OwnTemplate, stops: tuple[str, ...], known: Sequence[Notation]
) -> Reader | None:
    """The first reader that reads a call, as this template writes it, back as it was."""
    try:
        text = TemplateNotation(template, stops, None).answer(_CALL)
    except (MessageError, NotAppendOnly):
        return None
    text = text.removesuffix(next(stop for stop in stops if text.endswith(stop)))
    readers: list[Reader] = [*known, QwenXml(opened=False), QwenXml(opened=True)]
    return next((reader for reader in readers if reader.parse(text) == _CALL), None)


def _words(notation: TemplateNotation, answer: str) -> str:
    """What an agent is told that a model has said with an answer."""
    return notation.parse(answer.removesuffix(notation.stops[0])).content.strip()


def end_tokens(tokenizer: ChatTokenizer, notation: Notation) -> tuple[str, ...]:
    """All tokens at which an engine ends an answer."""
    return tuple(tokenizer.token_of(i) or "" for i in stop_ids(tokenizer, notation))


def template_notation(
    tokenizer: ChatTokenizer, template: OwnTemplate, known: Sequence[Notation]
) -> TemplateNotation:
    """The notation of a checkpoint's template, not yet proven to be append-only."""
    try:
        stops = find_stops(tokenizer, template)
        reader = find_reader(template, stops, known)
        notation = TemplateNotation(template, stops, reader)
    except MessageError as error:
        raise UserError(
            f"the chat template of {tokenizer.directory} does not render a question and an answer: "
            f"{error}",
            "Choose another --chat-family.",
        ) from error
    ends = end_tokens(tokenizer, notation)
    for shape, message in _SHAPES.items():
        try:
            inner = inner_stop(notation.answer(message), ends)
        except (MessageError, NotAppendOnly):
            continue
        if shape == "words" and _words(notation, notation.answer(message)) != _PROBE:
            raise UserError(
                f"the chat template of {tokenizer.directory} writes the words {_PROBE!r} as "
                f"{notation.answer(message)!r}, which no known notation reads",
                "Choose another --chat-family.",
            )
        if inner is not None:
            raise UserError(
                f"the chat template of {tokenizer.directory} writes {inner!r}, which ends an "
                f"answer, also inside of one ({shape}), so that an engine would stop there",
                "Choose another --chat-family.",
            )
    return notation
