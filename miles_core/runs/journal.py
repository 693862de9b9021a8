"""The journal of a run: append-only, durable events with a sequence number."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import orjson

from miles_core.errors import UserError
from miles_core.runs.files import LineFile, complete_lines, dumps

EVENTS = frozenset(
    {
        "run_started",
        "stage",
        "tasks_checked",
        "group_started",
        "trial_started",
        "trial_ended",
        "group_ready",
        "group_dropped",
        "step_trained",
        "evaluated",
        "weights_pushed",
        "checkpoint_saved",
        "alarm",
        "run_ended",
    }
)


class JournalError(UserError):
    """A line in the middle of a journal is damaged."""


class Journal:
    """Writer of a journal.

    Opening cuts off a torn last line. `append` may be called from several threads, and its event
    is on the disk when it returns. Numbering goes on from the last event in the file, also when
    another process has appended meanwhile.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._mutex = threading.Lock()
        self._file = LineFile(self.path)
        self._file.cut_torn_line()

    def append(self, event: str, **fields: Any) -> dict[str, Any]:
        """Add an event and return it with its `seq` (from 1) and `time` (seconds since 1970)."""
        if event not in EVENTS:
            raise ValueError(f"unknown journal event {event!r}; known: {', '.join(sorted(EVENTS))}")
        reserved = {"seq", "time"} & fields.keys()
        if reserved:
            raise ValueError(f"{', '.join(sorted(reserved))}: set by the journal")

        def line(last: bytes) -> bytes:
            seq = orjson.loads(last)["seq"] + 1 if last else 1
            return dumps({"seq": seq, "time": time.time(), "event": event, **fields})

        with self._mutex:
            written: dict[str, Any] = orjson.loads(self._file.append(line))
        return written

    def close(self) -> None:
        with self._mutex:
            self._file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Tail:
    """Reader that returns, at each call of `new()`, the events appended since the last one."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._offset = 0
        self._line = 0

    def new(self) -> list[dict[str, Any]]:
        """Events since the last call; none while the file does not exist."""
        events: list[dict[str, Any]] = []
        if not self.path.exists():
            return events
        for raw, offset in complete_lines(self.path, self._offset):
            self._line += 1
            self._offset = offset
            try:
                event = orjson.loads(raw)
            except orjson.JSONDecodeError as error:
                raise JournalError(
                    f"{self.path}, line {self._line}: not a journal event ({error})",
                    "The file was changed from outside or the disk is damaged. Restore it from a "
                    "copy, or start a new run.",
                ) from error
            events.append(event)
        return events


def read(path: str | Path) -> list[dict[str, Any]]:
    """All events of a journal; a torn last line is ignored, a missing file has none."""
    return Tail(path).new()
