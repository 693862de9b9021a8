"""What happens before the Ray job: stages in the journal, and steps that are child processes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from miles_core.cluster import local_process as procs
from miles_core.cluster.supervise import tail_text
from miles_core.errors import UserError
from miles_core.runs.directory import RunDir
from miles_core.runs.files import read_json, write_json
from miles_core.runs.journal import Journal

_POLL_S = 0.1
_EXIT_USAGE = 2


class StepFailed(UserError):
    """A preparing step ended with an error; its log has the reason."""


class StageResult:
    """Lets a stage say that its output was there already."""

    skipped = False


@contextmanager
def stage(run: RunDir, name: str) -> Iterator[StageResult]:
    """Journal the start and the end of a stage; a stage that fails has no end."""
    began = time.monotonic()
    result = StageResult()
    with Journal(run.journal) as journal:
        journal.append("stage", name=name, state="started")
        yield result
        ended = "skipped" if result.skipped else "ended"
        journal.append("stage", name=name, state=ended, seconds=time.monotonic() - began)


def record_inputs(run: RunDir, **values: Any) -> None:
    """Add values to `RUN/inputs.json`."""
    path = run.path / "inputs.json"
    known = read_json(path) if path.is_file() else {}
    if {**known, **values} != known:
        write_json(path, {**known, **values})


def run_module(
    run: RunDir, name: str, argv: list[str], interrupted: Callable[[], None]
) -> dict[str, Any]:
    """Run `python -m ARGV`, whose last line of output is a JSON object, and return that.

    Its log is `RUN/prepare/NAME.log`. `interrupted` is called while it runs and may raise; the
    child is ended then, as it is when this process dies. Raises StepFailed with the child's last
    words. Must be called from the main thread.
    """
    folder = run.path / "prepare"
    folder.mkdir(exist_ok=True)
    log, answer = folder / f"{name}.log", folder / f"{name}.json"
    with log.open("wb") as errors, answer.open("wb") as output:
        child = subprocess.Popen(
            [sys.executable, "-m", *argv],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            start_new_session=True,
            preexec_fn=procs.die_with_parent(),
        )
    try:
        while child.poll() is None:
            interrupted()
            time.sleep(_POLL_S)
    finally:
        if child.poll() is None:
            root = procs.process(child.pid)
            procs.end([*procs.descendants(child.pid), *([root] if root else [])], grace_s=5.0)
            child.wait()
    if child.returncode != 0:
        words = tail_text(log, 3 if child.returncode == _EXIT_USAGE else 15)
        raise StepFailed(
            f"{name} ended with status {child.returncode}:\n{words}", f"The whole log is {log}."
        )
    result: dict[str, Any] = json.loads(answer.read_text().strip() or "{}")
    return result
