"""A session: the tree of its turns, and where in it a request belongs.

Each turn is one model call. A request that repeats the recorded messages and adds new ones
continues the turn that it repeats; any other request starts a branch at the last turn that it
shares. Nothing recorded is ever changed.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from miles_core.sessions.families.family import ChatFamily, NotAppendOnly
from miles_core.sessions.messages import Message, starts_with
from miles_core.sessions.protocol import EndReason, SessionRequest


@dataclass(frozen=True, eq=False)
class Turn:
    """One recorded model call.

    `new_messages` are those since the parent's answer, `answer` is what was sampled; in ids:
    `prompt_ids` follow the parent's `output_ids`. `logprobs` belong to `output_ids`.
    """

    parent: Turn | None
    tools_key: str
    new_messages: tuple[Message, ...]
    answer: Message
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    rid: str
    weight_version: int
    finish_reason: str

    def path(self) -> list[Turn]:
        """The turns from the first one to this."""
        turns: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        return turns[::-1]

    def messages(self) -> list[Message]:
        return [m for turn in self.path() for m in (*turn.new_messages, turn.answer)]

    def ids(self) -> list[int]:
        return [i for turn in self.path() for i in (*turn.prompt_ids, *turn.output_ids)]


@dataclass(frozen=True)
class Place:
    """Where a request belongs: after `parent` (None: at a root) with these new messages."""

    parent: Turn | None
    tools_key: str
    new_messages: tuple[Message, ...]
    prompt_ids: tuple[int, ...]

    def input_ids(self) -> list[int]:
        """What the engine is asked to continue."""
        return [*(self.parent.ids() if self.parent else ()), *self.prompt_ids]


@dataclass
class Session:
    """State of one session; `lock` serialises its model calls."""

    request: SessionRequest
    session_id: str = field(default_factory=lambda: secrets.token_hex(16))
    turns: list[Turn] = field(default_factory=list)
    end_reason: EndReason | None = None
    closed: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    running: set[asyncio.Task[Any]] = field(default_factory=set)

    @property
    def name(self) -> str:
        """For logs: the given name, never the secret."""
        return self.request.session_id or self.session_id[:6]

    def superseded(self) -> set[Turn]:
        """Turns whose answer the client never used: it asked the very same again."""
        with_children = {turn.parent for turn in self.turns}
        last = {_question(turn): turn for turn in self.turns}
        return {
            turn
            for turn in self.turns
            if turn not in with_children and last[_question(turn)] is not turn
        }

    def kept_turns(self) -> list[Turn]:
        dropped = self.superseded()
        return [turn for turn in self.turns if turn not in dropped]

    def leaves(self) -> Iterator[Turn]:
        """The last turn of each branch that is kept, in the order of recording."""
        with_children = {turn.parent for turn in self.turns}
        return (turn for turn in self.kept_turns() if turn not in with_children)

    def find_parent(self, messages: list[Message], key: str) -> tuple[Turn | None, int]:
        """The deepest, newest turn whose whole conversation `messages` repeat, and its length.

        Matching goes down the tree, so each recorded message is compared about once.
        """
        best: tuple[Turn | None, int] = (None, 0)
        matched: dict[Turn | None, int] = {None: 0}
        for turn in self.turns:  # parents come before their children
            at = matched.get(turn.parent)
            if at is None or turn.tools_key != key:
                continue
            recorded = (*turn.new_messages, turn.answer)
            if starts_with(messages[at:], recorded):
                matched[turn] = at + len(recorded)
                if matched[turn] >= best[1]:
                    best = (turn, matched[turn])
        return best

    def place(
        self, family: ChatFamily, messages: list[Message], tools: list[dict[str, Any]]
    ) -> Place:
        """Where `messages` belong, and the ids that are new. Raises `MessageError`.

        When the checkpoint's own template rewrites the past, the conversation starts anew at a
        root: the model is shown exactly what its template says, as a sample of its own.
        """
        key = json.dumps(tools, sort_keys=True)
        parent, length = self.find_parent(messages, key)
        if parent is not None:
            new = messages[length:]
            try:
                suffix = family.render_suffix(parent.messages(), new, tools)
            except NotAppendOnly:
                parent = None
            else:
                ids = family.join(parent.output_ids, suffix)
                return Place(parent, key, tuple(new), tuple(ids))
        prompt = family.render_prompt(messages, tools)
        return Place(None, key, tuple(messages), tuple(prompt))


def _question(turn: Turn) -> tuple[Turn | None, tuple[int, ...], str]:
    return (turn.parent, turn.prompt_ids, turn.tools_key)
