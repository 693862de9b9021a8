"""Whose a sandbox is: each trials directory has an id, which is a part of all its sandboxes.

The id is random, so that two servers with directories of the same name, on one host or with one
account of a cloud, never take each other's sandboxes for their own. A copy of a trials directory
gets an id of its own.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from miles_core.agent_server.atomic import write_file

FILE = ".sandboxes.json"
READABLE = 60
"""Characters of a trial's id that are repeated in the name of its sandboxes, for people."""


@dataclass(frozen=True)
class Owner:
    """The owner of sandboxes: `kinds` are those that were ever made for this directory."""

    id: str
    kinds: tuple[str, ...] = ()

    def name(self, trial_id: str, session_id: str) -> str:
        """The name of one sandbox; a name of containers, networks and images in every engine."""
        plain = re.sub("[^a-z0-9]+", "-", trial_id.lower())[:READABLE].strip("-")
        return f"miles-{self.id}-{tag(trial_id)}{tag(session_id)}-{plain}"

    def named(self, text: str) -> Named | None:
        """The sandbox of this owner whose name is in `text`, with whatever behind it."""
        found = re.search(rf"(miles-{self.id}-([0-9a-f]{{8}})[0-9a-f]{{8}})-([a-z0-9-]+)", text)
        return Named(found[1], found[3], found[2]) if found else None


@dataclass(frozen=True)
class Named:
    """What the name of a sandbox begins with, which no other's does; its trial's id as far as it
    can be read there, and the tag of that id."""

    name: str
    trial: str
    tag: str


def tag(text: str) -> str:
    """Eight hexadecimal digits that stand for a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def read_owner(trials_dir: Path) -> Owner | None:
    """The owner of a trials directory; None where no server has made a sandbox."""
    try:
        kept = json.loads((trials_dir / FILE).read_bytes())
    except FileNotFoundError:
        return None
    if kept["directory"] != str(trials_dir.resolve()):
        return None
    return Owner(kept["id"], tuple(kept["kinds"]))


def open_owner(trials_dir: Path, kind: str) -> Owner:
    """The owner of a trials directory in which sandboxes of `kind` will be made; kept there."""
    known = read_owner(trials_dir) or Owner(secrets.token_hex(6))
    if kind in known.kinds:
        return known
    owner = Owner(known.id, (*known.kinds, kind))
    kept = {"id": owner.id, "kinds": owner.kinds, "directory": str(trials_dir.resolve())}
    write_file(trials_dir / FILE, json.dumps(kept).encode())
    return owner
