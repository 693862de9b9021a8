"""The notation `template`: whatever a checkpoint's own template writes, if it only ever appends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Protocol

from miles_core.errors import UserError
from miles_core.sessions.families.jinja import OwnTemplate
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
_THINKING = Message("assistant", _PROBE, (), "thought")
_UNREAD = {"call": "the template writes no calls, or none in a form that is known"}
_RESULT = Message("tool", "result", (), "", "call00000", "probe")


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
        self._prompts = {role: self._prompt_after(role) for role in ("user", "tool", "system")}
        self.reasoning = self._keeps_reasoning()

    def _prompt_after(self, role: str) -> str:
        """The generation prompt after a message of `role`; that after a user's where refused."""
        opening = {"user": [_USER], "system": [Message("system", "rule")]}
        messages = opening.get(role, [_USER, _CALL, _RESULT])
        try:
            before = self.template.render(messages)
            after = self.template.render(messages, (), True)
        except MessageError:
            if role == "user":
                raise
            return self._prompt_after("user")
        return after[len(before) :] if after.startswith(before) else ""

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
        return self.template.render(messages, tools)

    def generation_prompt(self, last: Message | None) -> str:
        return self._prompts.get(last.role if last else "user", self._prompts["user"])

    def answer(self, message: Message) -> str:
        prompt = self.template.render([_USER], (), True)
        whole = self.template.render([_USER, message])
        if not whole.startswith(prompt):
            raise NotAppendOnly("an answer does not begin with the generation prompt")
        end = self.answer_end(whole, len(prompt))
        return whole[len(prompt) : end]

    def answer_end(self, text: str, after: int) -> int:
        """Where the answer that `text` ends with ends, its stop token included."""
        ends = [(text.rfind(stop, after), len(stop)) for stop in self.stops]
        at, size = max(ends)
        if at < 0:
            raise NotAppendOnly("an answer does not end with a stop token")
        return at + size

    def continuation(
        self, previous: Sequence[Message], stop: str | None, new: Sequence[Message], tools: Tools
    ) -> str:
        if not self.local:
            return self._continued(previous, stop, new, tools)
        try:
            return self._continued([_USER, previous[-1]], stop, new, ())
        except MessageError:
            # A template may refuse an answer, such as one with several calls, and yet be able to
            # say what stands after it.
            plain = _CALL if previous[-1].tool_calls else Message("assistant", _PROBE)
            return self._continued([_USER, plain], stop, new, ())

    def _continued(
        self, previous: Sequence[Message], stop: str | None, new: Sequence[Message], tools: Tools
    ) -> str:
        now = datetime.now()
        asked = self.template.render(previous[:-1], tools, True, now)
        before = self.template.render(previous, tools, False, now)
        after = self.template.render([*previous, *new], tools, True, now)
        cut = self.answer_end(before, 0)
        if not after.startswith(asked) or not after.startswith(before[:cut]):
            raise NotAppendOnly("the template rewrites earlier messages")
        return ("" if stop in self.stops else self.stops[0]) + after[cut:]

    def parse(self, text: str, tools: Tools = ()) -> Message:
        return self.reader.parse(text, tools) if self.reader else Message("assistant", text)

    def settled(self, text: str) -> tuple[str, str]:
        return self.reader.settled(text) if self.reader else ("", text)


def find_stops(tokenizer: ChatTokenizer, template: OwnTemplate) -> tuple[str, ...]:
    """The tokens that a template ends answers with: first that of words, then that of a call."""
    tail = template.render([_USER, Message("assistant", _PROBE)]).rpartition(_PROBE)[2]
    first = tokenizer.encode(tail.lstrip())[:1]
    if not any(map(tokenizer.is_added, first)):
        raise UserError(
            f"the chat template of {tokenizer.directory} ends an answer with {tail!r}, "
            "which does not begin with a token of its own",
            "Choose another --chat-family.",
        )
    found = [tokenizer.token_of(i) for i in [*first, *_end_of_call(tokenizer, template)]]
    return tuple(dict.fromkeys(token for token in found if token is not None))


def _end_of_call(tokenizer: ChatTokenizer, template: OwnTemplate) -> list[int]:
    """The first special token after what a call says, if the template writes calls."""
    try:
        text = template.render([_USER, _CALL])
    except MessageError:
        return []
    _, said, tail = text.rpartition(_ARGUMENT)
    ids = tokenizer.encode(tail) if said else []
    return next(([i] for i in ids if tokenizer.is_special(i)), [])


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


def template_notation(
    tokenizer: ChatTokenizer, template: OwnTemplate, known: Sequence[Notation]
) -> TemplateNotation:
    """The notation of a checkpoint's template, not yet proven to be append-only."""
    try:
        stops = find_stops(tokenizer, template)
        reader = find_reader(template, stops, known)
        return TemplateNotation(template, stops, reader)
    except MessageError as error:
        raise UserError(
            f"the chat template of {tokenizer.directory} does not render a question and an answer: "
            f"{error}",
            "Choose another --chat-family.",
        ) from error
