"""`miles-agent-server --sweep`: what is left of a trials directory's sandboxes, shown or ended."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import sys
from collections.abc import Iterator
from pathlib import Path

from miles_core.agent_server.reaper.kinds import kinds_of, warning
from miles_core.agent_server.reaper.left import Left
from miles_core.agent_server.reaper.owner import read_owner
from miles_core.agent_server.reaper.reaper import Reaper
from miles_core.errors import UserError

LOCK = ".lock"
"""Held by the server that works in a trials directory (`main.lock_trials`)."""
COLUMNS = ("kind", "sandbox", "trial", "age", "what", "why")


def sweep(trials_dir: Path, end: bool) -> int:
    """Print a line for each sandbox of no running trial, and end them with `end`; an exit status.

    Raises UserError where a server works in the directory and `end` is asked for, as that server
    ends them itself.
    """
    owner = read_owner(trials_dir)
    if owner is None:
        print(f"no server has made a sandbox for {trials_dir}")
        return 0
    with _locked(trials_dir) as free:
        if end and not free:
            raise UserError(
                f"--sweep now: a server works in {trials_dir}",
                "It ends what it finds by itself; --sweep dry-run shows it.",
            )
        kinds, unlisted = kinds_of(owner)
        for name in unlisted:
            print(f"note: {warning(name)}")
        running = [] if free else _unfinished(trials_dir)
        return asyncio.run(_sweep(Reaper(kinds, lambda: running), end))


async def _sweep(reaper: Reaper, end: bool) -> int:
    found = await (reaper.sweep() if end else reaper.find())
    rows = [COLUMNS, *(_row(left) for left in found)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(COLUMNS))]
    for row in rows if found else []:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )
    number = f"{len(found)} sandbox{'' if len(found) == 1 else 'es'}"
    print(f"{number} {'ended' if end else 'would be ended; nothing was'}")
    for problem in reaper.problems:
        print(f"miles-agent-server: {problem}", file=sys.stderr)
    return 1 if reaper.problems else 0


def _row(left: Left) -> tuple[str, ...]:
    age = "?" if left.age_s is None else f"{left.age_s:.0f} s"
    return (left.kind, left.id, left.trial, age, left.content, "its trial does not run")


@contextlib.contextmanager
def _locked(trials_dir: Path) -> Iterator[bool]:
    """Whether no server holds the lock of a trials directory; none can begin meanwhile."""
    with open(trials_dir / LOCK, "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield True
        except BlockingIOError:
            yield False


def _unfinished(trials_dir: Path) -> list[str]:
    """The trials that have begun and not ended."""
    begun = (path.parent for path in trials_dir.glob("*/started.json"))
    return [trial.name for trial in begun if not (trial / "result.json").exists()]
