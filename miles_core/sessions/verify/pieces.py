"""Checks on the pieces of conversations: the prompt, answers, and what follows them."""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass

from miles_core.sessions.families.family import ChatFamily
from miles_core.sessions.families.features import features
from miles_core.sessions.messages import Message, MessageError
from miles_core.sessions.parsers.sglang import Parse
from miles_core.sessions.verify.corpus import Conversation
from miles_core.sessions.verify.report import Check, Where, difference

_MOST_CUTS = 24


@dataclass(frozen=True)
class Step:
    """An answer of a conversation: `prompt` are all ids before it, `follow` the ids after it.

    `end` is the number of messages when the model is asked again.
    """

    index: int
    prompt: list[int]
    output: list[int]
    follow: list[int]
    end: int


def steps(family: ChatFamily, conversation: Conversation) -> Iterator[Step]:
    """The answers of a conversation, each in its canonical form. Raises `MessageError`."""
    messages, tools = conversation.messages, conversation.tools
    answers = conversation.answers()
    if not answers:
        return
    ids = family.render_prompt(messages[: answers[0]], tools)
    for index, end in zip(answers, [*answers[1:], len(messages)], strict=True):
        output = family.render_output(messages[index])
        new = messages[index + 1 : end]
        follow = family.continue_turn(messages[: index + 1], output, new, tools) if new else []
        yield Step(index, ids, output, follow, end)
        ids = [*ids, *output, *follow]


class PieceChecks:
    """Append-only, exact in ids, cut answers, reading back and streaming."""

    def __init__(self, family: ChatFamily, seed: int, theirs: Parse | None) -> None:
        self.family, self._theirs, self._rng = family, theirs, random.Random(seed)
        self.append_only = Check("append-only", "prompt, answers and continuations are the whole")
        self.ids = Check("ids", "ids of the pieces decode to the text of the whole")
        self.cut = Check(
            "truncated", "an answer cut at any token gets its end, and goes on the same"
        )
        self.ends = Check("ends", "an answer ends with a stop token, and has none before")
        self.parsed = Check("parsed", "every answer is read back as it was")
        self.streamed = Check("streamed", "what is sent early is the beginning of the answer")
        self.sglang = Check("sglang", "SGLang's parsers read the same")
        self._apart: list[tuple[int, int]] = []
        self._changed = 0

    def checks(self) -> list[Check]:
        if self._apart:
            number, message = self._apart[0]
            self.ids.notes.append(
                f"{len(self._apart)} of {self.ids.passed} texts have other ids when they are "
                f"tokenised at once (first in conversation {number}, at message {message}), with "
                "the same text: harmless, since sampled ids are never made anew"
            )
        if self._changed:
            self.ids.notes.append(
                f"{self._changed} texts are other ones when the tokenizer has encoded and decoded "
                "them: it does not keep every text"
            )
        if self._theirs is None:
            self.sglang.notes.append("SGLang's parsers are not installed, or it has none for these")
        checks = [self.append_only, self.ids, self.ends, self.cut, self.parsed, self.streamed]
        return [*checks, self.sglang]

    def add(self, number: int, conversation: Conversation) -> None:
        """Check one conversation; raises `MessageError` where the family refuses it."""
        for step in list(steps(self.family, conversation)):
            where = Where(number, conversation, step.index)
            self._ends(where, step)
            self._parsed(where, step)
            if step.follow:
                self._whole(Where(number, conversation, step.end - 1), step)
                self._cuts(where, step)

    def _ends(self, where: Where, step: Step) -> None:
        family, stops = self.family, self.family.stop_token_ids
        at = next((i for i, token_id in enumerate(step.output) if token_id in stops), None)
        right = at is not None and at == len(step.output) - 1
        before = family.tokenizer.decode(step.output if at is None else step.output[: at + 1])
        whole = family.tokenizer.decode(step.output)
        self.ends.hold(right, where, f"an engine would end {whole!r} after {before!r}")

    def _whole(self, where: Where, step: Step) -> None:
        family, conversation = self.family, where.conversation
        whole = family.render_text(conversation.messages[: step.end], conversation.tools)
        before = family.render_text(conversation.messages[: step.index], conversation.tools)
        pieces = before + family.notation.answer(conversation.messages[step.index])
        kept = whole.startswith(pieces)
        self.append_only.hold(kept, where, difference(whole, pieces, "what was there"))
        ids = [*step.prompt, *step.output, *step.follow]
        at_once = family.tokenizer.encode(whole)
        ours, theirs = family.tokenizer.decode(ids), family.tokenizer.decode(at_once)
        self.ids.hold(ours == theirs, where, difference(ours, theirs, "the whole"))
        if ours == theirs and ids != at_once:
            self._apart.append((where.number, self._message_apart(where, ids, at_once)))
        self._changed += theirs != whole and theirs != unicodedata.normalize("NFC", whole)

    def _message_apart(self, where: Where, ids: list[int], at_once: list[int]) -> int:
        """The message in which two tokenisations of a conversation part."""
        pairs = zip(ids, at_once, strict=False)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ids), len(at_once)))
        text = self.family.tokenizer.decode(ids[:same])
        talk = where.conversation
        for end in range(1, where.message + 1):
            try:
                before = self.family.render_text(talk.messages[:end], talk.tools, False)
            except MessageError:
                continue
            if len(before) > len(text):
                return end - 1
        return where.message

    def _cuts(self, where: Where, step: Step) -> None:
        family, messages = self.family, where.conversation.messages
        tools, new = where.conversation.tools, messages[step.index + 1 : step.end]
        whole = family.tokenizer.decode(step.follow)
        cuts = range(len(step.output))
        if len(cuts) > _MOST_CUTS:
            cuts = self._rng.sample(cuts, _MOST_CUTS)  # type: ignore[assignment]
        for cut in cuts:
            sampled = step.output[:cut]
            answer = family.parse_message(sampled, tools)
            previous = [*messages[: step.index], answer]
            follow = family.continue_turn(previous, sampled, new, tools)
            text = family.tokenizer.decode(follow)
            ended = family.stop_of(sampled) or (follow and follow[0] in family.stop_token_ids)
            what = f"cut after {cut} of {len(step.output)} ids: " + difference(text, whole)
            self.cut.hold(bool(ended) and text.endswith(whole), where, what)

    def _parsed(self, where: Where, step: Step) -> None:
        family, conversation = self.family, where.conversation
        message = conversation.messages[step.index]
        text = family.text_of(step.output)
        found = family.notation.parse(text, conversation.tools)
        reason = None if found == message else self._reason(message, text)
        if reason:
            self.parsed.excuse(reason)
        else:
            self.parsed.hold(found == message, where, f"read as {found}")
        if self._theirs is not None:
            theirs = self._theirs(text, conversation.tools)
            self.sglang.hold(theirs == found, where, f"{theirs} instead of {found}")
        self._streams(where, text, found)

    def _reason(self, message: Message, text: str) -> str | None:
        """Why an answer may be read back as another one, if there is a known reason."""
        exceptions = self.family.notation.exceptions
        known = features([message], False, False) & exceptions.keys()
        written = self.family.notation.answer(message)
        if not written.startswith(text) and unicodedata.normalize("NFC", written).startswith(text):
            return "the tokenizer composes letters and their marks (Unicode NFC)"
        return exceptions[min(known)] if known else None

    def _streams(self, where: Where, text: str, found: Message) -> None:
        reasoning, content = "", ""
        lengths = range(len(text) + 1)
        if len(lengths) > 4 * _MOST_CUTS:
            lengths = sorted(self._rng.sample(lengths, 4 * _MOST_CUTS))  # type: ignore[assignment]
        for length in lengths:
            before = reasoning, content
            reasoning, content = self.family.notation.settled(text[:length])
            grows = reasoning.startswith(before[0]) and content.startswith(before[1])
            right = found.reasoning_content.startswith(reasoning)
            right = right and found.content.startswith(content)
            what = f"after {length} characters {reasoning!r} and {content!r} were sent"
            self.streamed.hold(grows and right, where, what)
