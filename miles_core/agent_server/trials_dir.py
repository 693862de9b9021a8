"""What a server keeps of its trials: `started.json` and `result.json` of each, which outlive it.

A result that cannot be written waits in memory. A directory that was removed or replaced under the
server is never written to: what is there is not what the server locked.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from miles_core.agent_server.atomic import write_file
from miles_core.agent_server.protocol import TrialResult, valid_id

RETRY_S = 30
"""Seconds after which to ask again whether a trial can be kept."""
_FULL = (errno.ENOSPC, errno.EDQUOT)


class CannotKeep(Exception):
    """No trial can be started, since it could not be kept; `code` is that of the error form."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class TrialsDir:
    """The trials directory of one server."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._place: tuple[int, int] | None = None
        self._unkept: dict[str, tuple[TrialResult, float]] = {}
        """Results that could not be written yet, and when each trial has ended."""
        self._told = False

    def open(self) -> None:
        """Begin; from now on the directory is the one that it is now."""
        self.root.mkdir(parents=True, exist_ok=True)
        self._place = self._found()

    def _found(self) -> tuple[int, int] | None:
        try:
            status = os.stat(self.root)
        except OSError:
            return None
        return status.st_dev, status.st_ino

    def problem(self, trial_id: str | None = None) -> str | None:
        """What happened to the directory, or to that of a trial that has begun; None if nothing."""
        found = self._found()
        if found is None:
            return f"the trials directory {self.root} is gone"
        if found != self._place:
            return f"the trials directory {self.root} is another one than when the server started"
        if trial_id is not None and not self._started(trial_id).exists():
            return f"{self.root / trial_id} was removed while the trial was running"
        return None

    def unfinished(self) -> Iterator[str]:
        """The trials that have begun and have no result."""
        for entry in sorted(self.root.iterdir()):
            begun = valid_id(entry.name) and self._started(entry.name).exists()
            if begun and not self._result(entry.name).exists():
                yield entry.name

    def begin(self, trial_id: str, started: dict[str, Any]) -> None:
        """Keep that a trial has begun. Raises CannotKeep, and then nothing is left of it."""
        problem = self.problem()
        if problem:
            raise CannotKeep("trials_dir_gone", problem)
        place = self.root / trial_id
        fresh = not place.exists()
        try:
            write_file(self._started(trial_id), orjson.dumps(started))
        except OSError as error:
            if fresh:
                shutil.rmtree(place, ignore_errors=True)
            code = "disk_full" if error.errno in _FULL else "trials_dir_unwritable"
            raise CannotKeep(code, f"{self.root}: {error.strerror or error}") from error

    def keep(self, result: TrialResult) -> None:
        """Keep how a trial has ended, in memory while it cannot be written."""
        self._unkept[result.trial_id] = (result, time.time())
        self.flush()

    def flush(self) -> None:
        """Write the results that are not on the disk yet; a full disk may have room later."""
        if not self._unkept:
            return
        problem = self.problem()
        try:
            for trial_id in list(self._unkept) if problem is None else []:
                data = self._unkept[trial_id][0].model_dump_json(indent=2).encode()
                write_file(self._result(trial_id), data)
                del self._unkept[trial_id]
        except OSError as error:
            problem = f"{self.root}: {error}"
        if problem and not self._told:
            print(f"results wait in memory: {problem}", file=sys.stderr, flush=True)
        self._told = problem is not None

    def knows(self, trial_id: str) -> bool:
        """Whether a trial has ended here."""
        return trial_id in self._unkept or self._result(trial_id).exists()

    def result(self, trial_id: str) -> tuple[TrialResult, float] | None:
        """How a trial has ended and how many seconds ago; None for one that has not."""
        if trial_id in self._unkept:
            result, ended = self._unkept[trial_id]
        else:
            path = self._result(trial_id)
            try:
                ended = path.stat().st_mtime
                result = TrialResult.model_validate_json(path.read_bytes())
            except FileNotFoundError:
                return None
        return result, max(0.0, time.time() - ended)

    def digests(self, trial_id: str) -> dict[str, str]:
        """Of the request that started a trial; of one that cannot be read there are none."""
        try:
            return dict(orjson.loads(self._started(trial_id).read_bytes())["digests"])
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    def _started(self, trial_id: str) -> Path:
        return self.root / trial_id / "started.json"

    def _result(self, trial_id: str) -> Path:
        return self.root / trial_id / "result.json"
