"""A sandbox that was found, and what each kind of sandbox must offer to have them found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol


class KindFailed(RuntimeError):
    """Sandboxes of a kind could not be listed or ended; the message says what the tool said."""


@dataclass
class Left:
    """One sandbox of this trials directory that is there, also when only a part of it is."""

    kind: str
    id: str
    trial: str
    """The trial's id, or as much of it as its name holds."""
    tag: str | None
    """The tag of the trial's id (`owner.tag`); None when no trial can own it any more."""
    age_s: float | None
    parts: dict[str, list[str]] = field(default_factory=dict)
    """What it consists of: ids by what they are."""

    @property
    def content(self) -> str:
        """Its parts in words."""
        return ", ".join(f"{noun}: {len(ids)}" for noun, ids in self.parts.items())


class Kind(Protocol):
    """A kind of sandbox that can be listed."""

    name: str

    async def find(self) -> list[Left]:
        """All that are there and belong to this trials directory; raises KindFailed."""

    async def remove(self, left: Left) -> None:
        """End one and remove what is left of it; raises KindFailed."""
