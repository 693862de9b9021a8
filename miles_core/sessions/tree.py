"""The tree of a session's turns, and where in it a request belongs.

Each turn is one model call. A request that repeats recorded messages and adds new ones continues
the deepest turn that it repeats; any other request starts a branch at the last turn that it shares,
or a new root. Nothing recorded is ever changed.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from miles_core.sessions.messages import Message, MessageError, parse_message

_MOST_FORMS = 3

Question = tuple[bytes, bytes, str]


@dataclass(eq=False, slots=True)
class Turn:
    """One recorded model call.

    `new` are the messages since the parent's answer, `answer` is what was sampled. `prompt_ids`
    (int32) follow the parent's `output_ids` (int32), to which `logprobs` (float64) belong. `length`
    counts all ids from the root to the end of this turn. `versions` are (weight version, start,
    end) over `output_ids`. `started` and `ended` are moments of the session's own count of events.
    `experts` is where the journal has the rows of routed experts, if there are any. `unseen`: its
    client had gone away when the answer came.

    `forms` are the last ways in which a client has sent `new` and `answer`. It repeats all earlier
    messages with each request, nearly always in the form of the last time, so that comparing these
    is enough and nothing is parsed again. `digest` is that of all ids from the root to the end.
    """

    index: int
    parent: Turn | None
    tools_key: str
    new: tuple[Message, ...]
    answer: Message
    prompt_ids: np.ndarray
    output_ids: np.ndarray
    logprobs: np.ndarray
    length: int
    rid: str
    versions: tuple[tuple[int, int, int], ...]
    finish_reason: str
    started: int
    ended: int
    experts: tuple[int, int] | None = None
    unseen: bool = False
    forms: list[list[Any]] = field(default_factory=list)
    digest: bytes = field(init=False)

    def __post_init__(self) -> None:
        past = self.parent.digest if self.parent else b""
        ids = self.prompt_ids.tobytes() + self.output_ids.tobytes()
        self.digest = hashlib.blake2b(past + ids, digest_size=16).digest()

    def path(self) -> list[Turn]:
        """The turns from the first one to this."""
        turns: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        return turns[::-1]

    def messages(self) -> list[Message]:
        """The conversation up to this turn's answer."""
        return [message for turn in self.path() for message in (*turn.new, turn.answer)]

    def ids(self) -> np.ndarray:
        """All ids from the root to the end of this turn, int32."""
        parts = [part for turn in self.path() for part in (turn.prompt_ids, turn.output_ids)]
        return np.concatenate(parts)

    def is_repeated_by(self, sent: list[Any]) -> bool:
        """Whether messages of a request, as many as this turn has, are those of this turn."""
        try:
            if sent in self.forms:
                return True
            recorded = (*self.new, self.answer)
            same = all(
                mine.same_as(parse_message(raw, ""))
                for mine, raw in zip(recorded, sent, strict=True)
            )
        except (MessageError, RecursionError):
            return False
        # Python finds 1 == True: a form with other values than text would match what differs.
        if same and all(_only_text(raw) for raw in sent):
            self.forms = [*self.forms[1 - _MOST_FORMS :], sent]
        return same

    def question(self) -> Question:
        """What was asked: two turns with the same question differ in their answers alone.

        Two turns of the same ids are the same past, whichever of them a request was attached to.
        """
        return question(self.parent, self.prompt_ids, self.tools_key)


def question(parent: Turn | None, prompt_ids: np.ndarray, tools_key: str) -> Question:
    """What a call asks, as something to compare."""
    return parent.digest if parent else b"", prompt_ids.tobytes(), tools_key


class Tree:
    """All turns of a session, parents before their children."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self._children: dict[Turn | None, list[Turn]] = defaultdict(list)

    def add(self, turn: Turn) -> None:
        """Record a turn; its parent is in the tree."""
        self.turns.append(turn)
        self._children[turn.parent].append(turn)

    def attach(self, messages: list[Any], tools_key: str) -> tuple[Turn | None, int]:
        """The deepest turn whose whole conversation `messages` repeat, and its length.

        `messages` are a request's, as they came. Of two turns as deep the newer one is taken.
        """
        best: tuple[Turn | None, int] = (None, 0)
        front = [best]
        while front:
            turn, at = front.pop()
            if at > best[1] or (at == best[1] and turn and turn.index > _index(best[0])):
                best = (turn, at)
            for child in self._children.get(turn, ()):
                if child.tools_key == tools_key:
                    end = at + len(child.new) + 1
                    if end <= len(messages) and child.is_repeated_by(messages[at:end]):
                        front.append((child, end))
        return best

    def continued(self, turn: Turn) -> bool:
        """Whether a later turn builds on this one's answer."""
        return turn in self._children

    def kept(self) -> list[Turn]:
        """The turns that count and are trained, in the order of recording.

        Left out are those whose answer the client never used, because it asked the very same again:
        no kept turn builds on them. Two calls that ran at the same time are no retry of each other,
        unless one of them has lost its client.
        """
        last: dict[Question, Turn] = {}
        for turn in self.turns:
            other = last.setdefault(turn.question(), turn)
            if (not turn.unseen, turn.started) > (not other.unseen, other.started):
                last[turn.question()] = turn
        kept: list[Turn] = []
        used: set[Turn | None] = set()
        for turn in reversed(self.turns):  # children come before their parents
            other = last[turn.question()]
            again = other is not turn and (turn.unseen or other.started >= turn.ended)
            if turn in used or not again:
                kept.append(turn)
                used.add(turn.parent)
        return kept[::-1]

    def snapshot(self) -> Tree:
        """A tree with the same turns, which stays as it is."""
        copy = Tree()
        for turn in self.turns:
            copy.add(turn)
        return copy


def _index(turn: Turn | None) -> int:
    return -1 if turn is None else turn.index


def _only_text(raw: dict[str, Any]) -> bool:
    calls = raw.get("tool_calls") or ()
    return all(isinstance(call["function"].get("arguments", ""), str) for call in calls)
