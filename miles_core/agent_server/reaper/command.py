"""`miles-agent-server --sweep`: what is left of a trials directory's sandboxes, shown or ended."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from miles_core.agent_server.reaper.kinds import kinds_of, warning
from miles_core.agent_server.reaper.left import Kind, KindFailed, Left
from miles_core.agent_server.reaper.owner import read_owner, tag
from miles_core.errors import UserError

LOCK = ".lock"
"""Held by the server that works in a trials directory (`main.lock_trials`)."""
COLUMNS = ("kind", "sandbox", "trial", "age", "what", "why")


def sweep(trials_dir: Path, end: bool) -> int:
    """Print a line for each sandbox of no running trial, and end them with `end`; an exit status.

    Raises UserError where a server works in the directory and `end` is asked for, as that server
    ends them itself, and where a kind cannot be listed.
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
        try:
            return asyncio.run(_sweep(kinds, [] if free else _unfinished(trials_dir), end))
        except KindFailed as error:
            raise UserError(f"--sweep: {error}") from error


async def _sweep(kinds: list[Kind], running: list[str], end: bool) -> int:
    rows: list[tuple[str, ...]] = [COLUMNS]
    owned = {tag(trial_id) for trial_id in running}
    for kind in kinds:
        for left in await kind.find():
            if left.tag in owned:
                continue
            if end:
                await kind.remove(left)
            rows.append(_row(left, bool(running), end))
    widths = [max(len(row[at]) for row in rows) for at in range(len(COLUMNS))]
    for row in rows if len(rows) > 1 else []:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )
    print(f"{len(rows) - 1} sandboxes {'ended' if end else 'would be ended; nothing was'}")
    return 0


def _row(left: Left, served: bool, end: bool) -> tuple[str, ...]:
    age = "?" if left.age_s is None else f"{left.age_s:.0f} s"
    why = "its trial does not run" if served else "no server runs its trial"
    return (left.kind, left.id, left.trial, age, left.content, why)


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
