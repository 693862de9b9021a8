"""What one agent of a trial is to do, and what is known of how it went."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from miles_core.agent_server.protocol import TrialRequest
from miles_core.agent_server.sandbox.processes import Member
from miles_core.verdicts import Cause


class AgentFailed(RuntimeError):
    """The agent could not do its work, by no doing of the policy; `cause` says why."""

    def __init__(self, cause: Cause, message: str) -> None:
        super().__init__(message)
        self.cause = cause


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
    own: frozenset[Member] = frozenset()
    """Processes in the sandbox that the agent's set-up started."""
    before: frozenset[Member] = frozenset()
    """Processes in the sandbox that were there before the agent, and are none of its own."""

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
        if event.get("event") == "turn":
            self.answered(event.get("usage"), int(event.get("tool_calls") or 0))
        elif event.get("event") == "end":
            self.events.append(event)

    def fail(self, cause: Cause, message: str) -> AgentFailed:
        """Note why there can be no verdict; returns the exception to raise."""
        self.failure = AgentFailed(cause, message)
        return self.failure


JOBS: dict[str, AgentJob] = {}
"""The agents of this process that are at work, by trial id."""
