"""What one agent of a trial is to do, and what is known of how it went."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from miles_core.agent_server.protocol import TrialRequest
from miles_core.agent_server.sandbox.processes import Member
from miles_core.verdicts import Cause

CONVERSATION_LIMIT = 2 << 20
"""Bytes of the messages that are kept of an agent at work."""
MOST_MESSAGES = 400
OUTAGE_SHARE = 0.5
"""A model call that is open for more than this share of an agent's time has ended the agent."""


class AgentFailed(RuntimeError):
    """The agent could not do its work, by no doing of the policy; `cause` says why."""

    def __init__(self, cause: Cause, message: str) -> None:
        super().__init__(message)
        self.cause = cause


class Conversation:
    """What an agent at work has said and seen so far, as OpenAI's messages: the last ones."""

    def __init__(self) -> None:
        self._messages: deque[tuple[int, dict[str, Any]]] = deque()
        self._bytes = 0
        self.count = 0
        """Messages of the present run of the agent."""
        self.runs = 0
        """How often the agent was started: once for each step of a task."""

    def add(self, number: int, message: dict[str, Any], size: int) -> None:
        """Take message `number` of a run; the message 0 begins one. `size` is in bytes."""
        if number == 0:
            self._messages.clear()
            self._bytes = 0
            self.runs += 1
        self.count = number + 1
        self._messages.append((size, message))
        self._bytes += size
        while self._bytes > CONVERSATION_LIMIT or len(self._messages) > MOST_MESSAGES:
            self._bytes -= self._messages.popleft()[0]

    def messages(self) -> list[dict[str, Any]]:
        """The messages that are kept, the oldest first."""
        return [message for _, message in self._messages]


@dataclass
class AgentJob:
    """One agent at work. The counts are None for an agent whose model calls are not seen."""

    request: TrialRequest
    config: dict[str, Any]
    turns: int | None = 0
    tool_calls: int | None = 0
    input_tokens: int | None = 0
    output_tokens: int | None = 0
    exit_status: str | None = None
    cause: Cause | None = None
    failure: AgentFailed | None = None
    events: list[dict[str, Any]] = field(default_factory=list)
    conversation: Conversation = field(default_factory=Conversation)
    own: frozenset[Member] = frozenset()
    """Processes in the sandbox that the agent's set-up started."""
    before: frozenset[Member] = frozenset()
    """Processes in the sandbox that were there before the agent, and are none of its own."""
    outage: str | None = None
    """That a model call without an answer took most of the time of an agent, if one did."""
    _call_began: float | None = None
    _waited_at: float | None = None
    """When an agent in another process last said that it waits for its call; None for one here."""

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """While the agent runs; when it is ended, note a call that was open most of its time."""
        began = time.monotonic()
        self.call_ends()
        try:
            yield
        except asyncio.CancelledError:
            now = time.monotonic()
            spent, waited = now - began, (self._waited_at or now) - (self._call_began or now)
            if waited > OUTAGE_SHARE * spent:
                what = f"the last model call was open for {waited:.0f} s"
                self.outage = f"{what} of the agent's {spent:.0f} s"
            raise

    def call_begins(self) -> None:
        """A model call was sent."""
        self._call_began, self._waited_at = time.monotonic(), None

    def call_ends(self) -> None:
        """A model call was answered."""
        self._call_began = self._waited_at = None

    def answered(self, usage: Mapping[str, Any] | None, tool_calls: int = 0) -> None:
        """Count one answer of the model, with the `usage` that it came with."""
        usage = usage or {}
        self.turns = (self.turns or 0) + 1
        self.tool_calls = (self.tool_calls or 0) + tool_calls
        self.input_tokens = (self.input_tokens or 0) + int(usage.get("prompt_tokens") or 0)
        self.output_tokens = (self.output_tokens or 0) + int(usage.get("completion_tokens") or 0)

    def on_line(self, line: bytes) -> None:
        """Take one line of the agent's standard output."""
        try:
            event = json.loads(line)
        except ValueError:
            return
        if not isinstance(event, dict):
            return
        if event.get("event") in ("call", "waiting"):
            self._waits(event["event"] == "call")
        elif event.get("event") == "turn":
            self.call_ends()
            self.answered(event.get("usage"), int(event.get("tool_calls") or 0))
        elif event.get("event") == "message":
            number, message = event.get("n"), event.get("message")
            if isinstance(number, int) and isinstance(message, dict):
                self.conversation.add(number, message, len(line))
        elif event.get("event") == "end":
            self.events.append(event)

    def _waits(self, first: bool) -> None:
        if first:
            self.call_begins()
        self._waited_at = time.monotonic()

    def fail(self, cause: Cause, message: str) -> AgentFailed:
        """Note why there can be no verdict; returns the exception to raise."""
        self.failure = AgentFailed(cause, message)
        return self.failure


JOBS: dict[str, AgentJob] = {}
"""The agents of this process that are at work, by trial id."""
