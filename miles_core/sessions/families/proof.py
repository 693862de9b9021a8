"""Proof that a checkpoint's own template only ever appends, and whether it needs the whole past."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from miles_core.sessions.families.notation import NotAppendOnly
from miles_core.sessions.families.own_template import TemplateNotation, inner_stop
from miles_core.sessions.messages import Message, MessageError
from miles_core.sessions.verify.corpus import Conversation


@dataclass(frozen=True)
class Break:
    """The message of a conversation at which a template rewrites what came before it."""

    conversation: Conversation
    index: int
    why: str

    def __str__(self) -> str:
        shown = [f"  {i}: {shorten(m)}" for i, m in enumerate(self.conversation.messages)]
        listed = "\n".join(shown[: self.index + 1])
        return f"{self.why}, at message {self.index} of this conversation:\n{listed}"


def shorten(message: Message, limit: int = 60) -> str:
    """One line about a message."""
    parts = [message.role]
    if message.reasoning_content:
        parts.append("reasoning")
    parts += [f"calls {call.name}" for call in message.tool_calls]
    text = repr(message.content)
    return f"{', '.join(parts)}: {text if len(text) <= limit else text[:limit] + '...'}"


def find_break(
    notation: TemplateNotation, conversation: Conversation, ends: Sequence[str]
) -> Break | None:
    """The first message at which the template is not append-only.

    `ends` are all tokens that end an answer. Raises `MessageError` where the template refuses the
    conversation.
    """
    tools, messages, answers = conversation.tools, conversation.messages, conversation.answers()
    for number, index in enumerate(answers):
        prompt = notation.prompt(messages[:index], tools)
        answered = notation.conversation(messages[: index + 1], tools)
        if not answered.startswith(prompt):
            return Break(conversation, index, "an answer does not follow the generation prompt")
        try:
            kept = answered[: notation.answer_end(answered, len(prompt))]
            usual = notation.answer(messages[index])
        except NotAppendOnly as error:
            return Break(conversation, index, str(error))
        answer = kept[len(prompt) :]
        inner = inner_stop(answer, ends)
        if inner is not None:
            why = f"an engine would end the answer at the {inner!r} inside of it"
            return Break(conversation, index, why)
        if answer != usual:
            why = f"an answer is written as {answer!r} here, and as {usual!r} after a question"
            return Break(conversation, index, why)
        last = answers[number + 1] if number + 1 < len(answers) else len(messages)
        for end in range(index + 2, last + 1):
            # Between two results of one answer a template may be in the middle of a turn.
            if not _rendered(notation, conversation, end, end == last).startswith(kept):
                return Break(conversation, end - 1, "the template rewrites earlier messages")
    return None


def _rendered(
    notation: TemplateNotation, conversation: Conversation, end: int, prompt: bool
) -> str:
    render = notation.prompt if prompt else notation.conversation
    return render(conversation.messages[:end], conversation.tools)


def is_local(notation: TemplateNotation, conversation: Conversation) -> bool:
    """Whether continuations of a conversation come out the same after a stand-in for its past."""
    whole = TemplateNotation(notation.template, notation.stops, notation.reader, local=False)
    short = TemplateNotation(notation.template, notation.stops, notation.reader, local=True)
    messages, tools, stop = conversation.messages, conversation.tools, notation.stops[0]
    answers = conversation.answers()
    for index, following in zip(answers, [*answers[1:], len(messages)], strict=True):
        new = messages[index + 1 : following]
        if not new:
            continue
        wanted = whole.continuation(messages[: index + 1], stop, new, tools)
        try:
            found = short.continuation(messages[: index + 1], stop, new, tools)
        except (MessageError, NotAppendOnly):
            return False
        if found != wanted:
            return False
    return True


def prove(
    notation: TemplateNotation, conversations: Sequence[Conversation], ends: Sequence[str]
) -> tuple[Break | None, bool, int]:
    """The first break, whether the template is local, and how many conversations it accepts."""
    local, accepted = True, 0
    for conversation in conversations:
        try:
            found = find_break(notation, conversation, ends)
            if found is not None:
                return found, False, accepted
            local = local and is_local(notation, conversation)
        except MessageError:
            continue
        except NotAppendOnly as error:
            return Break(conversation, len(conversation.messages) - 1, str(error)), False, accepted
        accepted += 1
    return None, local, accepted
