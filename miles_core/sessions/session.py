"""A session: the turns of one trial, their limits, and the calls that are running."""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from miles_core.sessions.calls import Calls
from miles_core.sessions.families import ChatFamily, NotAppendOnly
from miles_core.sessions.messages import Message, parse_message
from miles_core.sessions.protocol import EndReason, SessionRequest
from miles_core.sessions.tree import Question, Tree, Turn, question

_MOST_IGNORED = 32


def session_key(session_id: str) -> str:
    """What a session is called wherever its secret must not stand: files, logs, engines."""
    return hashlib.sha256(session_id.encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Place:
    """Where a request belongs: after `parent` (None: at a root) with these new messages."""

    parent: Turn | None
    tools_key: str
    new: tuple[Message, ...]
    prompt_ids: np.ndarray

    @property
    def length(self) -> int:
        """How many ids the engine is asked to continue."""
        return (self.parent.length if self.parent else 0) + len(self.prompt_ids)

    def question(self) -> Question:
        return question(self.parent, self.prompt_ids, self.tools_key)

    def input_ids(self) -> np.ndarray:
        """What the engine is asked to continue, int32."""
        if self.parent is None:
            return self.prompt_ids
        return np.concatenate([self.parent.ids(), self.prompt_ids])


@dataclass(eq=False)
class Session:
    """State of one session in memory.

    `events` counts starts and ends of calls: their order tells a retry from a parallel call.
    `lost`: its server died, so that it can only be read. `loaded` is the tree, or None while it is
    on disk alone.
    """

    request: SessionRequest
    session_id: str = field(default_factory=lambda: secrets.token_hex(16))
    loaded: Tree | None = field(default_factory=Tree)
    end_reason: EndReason | None = None
    closed: bool = False
    lost: bool = False
    calls: Calls = field(default_factory=Calls)
    events: int = 0
    used: float = field(default_factory=time.monotonic)
    ignored: set[str] = field(default_factory=set)
    expert_bytes: int | None = None

    @property
    def key(self) -> str:
        return session_key(self.session_id)

    @property
    def name(self) -> str:
        """For logs: the given name, never the secret."""
        return self.request.session_id or self.key[:6]

    @property
    def tree(self) -> Tree:
        """The turns; the session must be in memory."""
        if self.loaded is None:
            raise RuntimeError("the session is on disk")
        return self.loaded

    def next_event(self) -> int:
        self.events += 1
        return self.events

    def note_ignored(self, names: Sequence[str]) -> None:
        """Remember fields that ask for what no session can do; not without end."""
        for name in names:
            if len(self.ignored) < _MOST_IGNORED:
                self.ignored.add(name)

    def match(self, messages: list[Any], tools: list[dict[str, Any]]) -> Match:
        """Find what `messages` repeat and read the rest. Raises `MessageError`."""
        key = tools_key(tools)
        parent, length = self.tree.attach(messages, key)
        new = tuple(
            parse_message(messages[index], f"messages[{index}]")
            for index in range(length, len(messages))
        )
        return Match(parent, key, new, tools)


@dataclass(frozen=True)
class Match:
    """A request held against the tree: it repeats all up to `parent`, and `new` follows."""

    parent: Turn | None
    tools_key: str
    new: tuple[Message, ...]
    tools: list[dict[str, Any]]

    def render(self, family: ChatFamily, limit: int | None = None) -> Place:
        """The ids that are new. Raises `MessageError`. Safe in any thread.

        Raises `TooManyTokens` when they are certainly more than `limit` together with the past.

        When the checkpoint's own template rewrites the past, the conversation starts anew at a
        root: the model is shown exactly what its template says, as a sample of its own.
        """
        whole = self.new
        if self.parent is not None:
            previous: Sequence[Message] = [self.parent.answer]
            if not family.notation.local:
                previous = self.parent.messages()
            output_ids = self.parent.output_ids.tolist()
            left = None if limit is None else limit - self.parent.length
            try:
                ids = family.continue_turn(previous, output_ids, self.new, self.tools, left)
                return Place(self.parent, self.tools_key, self.new, np.array(ids, np.int32))
            except NotAppendOnly:
                whole = (*self.parent.messages(), *self.new)
        ids = family.render_prompt(whole, self.tools, limit=limit)
        return Place(None, self.tools_key, whole, np.array(ids, np.int32))


def tools_key(tools: list[dict[str, Any]]) -> str:
    """Equal for tool lists that say the same."""
    if not tools:
        return ""
    return hashlib.sha256(json.dumps(tools, sort_keys=True).encode()).hexdigest()[:16]
