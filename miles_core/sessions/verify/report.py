"""What a verification found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from miles_core.sessions.families.proof import shorten
from miles_core.sessions.verify.corpus import Conversation

_AROUND = 30


@dataclass(frozen=True)
class Fault:
    """The message of a conversation at which a check fails, and what was found there."""

    conversation: int
    message: int
    what: str
    messages: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "conversation": self.conversation,
            "message": self.message,
            "what": self.what,
            "messages": list(self.messages),
        }


@dataclass
class Check:
    """One property: how often it held, how often it did not, and the first time that it did not.

    `excused` counts known exceptions by their reason; `notes` say what is worth knowing.
    """

    name: str
    about: str
    passed: int = 0
    failed: int = 0
    first: Fault | None = None
    excused: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.failed

    @property
    def ran(self) -> bool:
        """Whether there was a case to check that is no known exception."""
        return bool(self.passed or self.failed)

    def hold(self, value: bool, where: Where, what: str) -> None:
        """Count one case; `what` says what is wrong where `value` is false."""
        if value:
            self.passed += 1
            return
        self.failed += 1
        self.first = self.first or where.fault(what)

    def excuse(self, reason: str) -> None:
        """Count a known exception."""
        self.excused[reason] = self.excused.get(reason, 0) + 1

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "about": self.about,
            "ok": self.ok,
            "passed": self.passed,
            "failed": self.failed,
            "excused": self.excused,
            "notes": self.notes,
            "first": self.first.to_json() if self.first else None,
        }


@dataclass(frozen=True)
class Where:
    """A message of a numbered conversation."""

    number: int
    conversation: Conversation
    message: int

    def fault(self, what: str) -> Fault:
        shown = [f"{i}: {shorten(m)}" for i, m in enumerate(self.conversation.messages)]
        return Fault(self.number, self.message, what, tuple(shown[: self.message + 1]))


@dataclass
class Report:
    """All checks of one family over one tokenizer."""

    tokenizer: str
    family: str
    seed: int
    conversations: int
    stop_tokens: list[str]
    local: bool
    checks: list[Check]
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """The object that `miles sessions verify --json` prints."""
        return {
            "tokenizer": self.tokenizer,
            "family": self.family,
            "ok": self.ok,
            "seed": self.seed,
            "conversations": self.conversations,
            "stop_tokens": self.stop_tokens,
            "local": self.local,
            "seconds": round(self.seconds, 3),
            "checks": [check.to_json() for check in self.checks],
        }


def difference(ours: str, theirs: str, name: str = "expected") -> str:
    """Where two texts part, with what stands around it."""
    pairs = zip(ours, theirs, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
    start = max(at - _AROUND, 0)
    return (
        f"after {ours[start:at]!r} there is {ours[at : at + _AROUND]!r}, "
        f"{name} is {theirs[at : at + _AROUND]!r}"
    )
