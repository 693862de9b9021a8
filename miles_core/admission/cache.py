"""Reports of tasks that were checked before, in one file, by what the tasks hold."""

from __future__ import annotations

import fcntl
import time
from pathlib import Path

from pydantic import ValidationError

from miles_core.admission.report import CHECKS_VERSION, State, TaskReport
from miles_core.errors import UserError
from miles_core.runs.files import fingerprint, read_json, write_json

FILE_NAME = "task_checks.json"
"""Name of the file in the folder where `miles train` keeps prepared inputs."""


class CheckCache:
    """The reports in `path`, for one kind of sandbox.

    The file is replaced as a whole, and what another process added meanwhile is kept. Reports of
    another version of the checks are not.
    """

    def __init__(self, path: Path, sandbox: str) -> None:
        self.path = path
        self.sandbox = sandbox
        self._entries = self._read()
        self._new: dict[str, TaskReport] = {}

    def get(self, task: str, digest: str) -> TaskReport | None:
        """The report of a task that holds this, whatever its name was then."""
        found = self._entries.get(self._key(digest))
        return found.model_copy(update={"task": task, "cached": True}) if found else None

    def put(self, report: TaskReport) -> None:
        """Remember a report until `save`, unless it says nothing of the task."""
        if report.digest is None or report.state is State.UNDECIDED:
            return
        kept = report.model_copy(update={"checked_at": time.time()})
        key = self._key(report.digest)
        self._entries[key] = self._new[key] = kept

    def save(self) -> None:
        """Write what is new; does nothing when nothing is."""
        if not self._new:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.with_name(f".{self.path.name}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            entries = {**self._read(), **self._new}
            reports = {key: report.to_json() for key, report in sorted(entries.items())}
            write_json(self.path, {"checks_version": CHECKS_VERSION, "reports": reports})
        self._new.clear()

    def _key(self, digest: str) -> str:
        return fingerprint([digest, self.sandbox])

    def _read(self) -> dict[str, TaskReport]:
        try:
            content = read_json(self.path)
            if content["checks_version"] != CHECKS_VERSION:
                return {}
            reports = content["reports"].items()
            return {key: TaskReport.model_validate(value) for key, value in reports}
        except FileNotFoundError:
            return {}
        except (ValueError, KeyError, TypeError, AttributeError, ValidationError) as error:
            raise UserError(
                f"{self.path} does not hold results of task checks",
                "Delete it, or name another file with --cache; the tasks are checked again.",
            ) from error
