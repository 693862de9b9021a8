"""Entry of the Ray job: `python -m miles_core.cluster.driver RUN --attempt N`.

It starts the services and the ranks, runs the steps, and leaves `exit.json` behind. The process
is one attempt of the run; everything that it starts ends with it.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import re
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from ray.exceptions import RayTaskError, UnserializableException

from miles_core.cluster.attempt import Attempt
from miles_core.cluster.guard import Interrupted
from miles_core.errors import UserError
from miles_core.rollout.outage import OutageError
from miles_core.runs.directory import RunDir
from miles_core.runs.files import write_json
from miles_core.runs.journal import Journal

log = logging.getLogger("miles.driver")

FINAL_ERRORS = (UserError, OutageError)
# The line of a traceback that names the error.
_LAST = re.compile(r"[A-Za-z_][\w.]*: \S")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="miles_core.cluster.driver", description=__doc__)
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("--attempt", type=int, required=True, help="number of this attempt")
    return parser.parse_args(argv)


def redirect_output(path: Path) -> None:
    """Append this process's output to a file, that of its libraries and children included."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


def innermost(error: BaseException) -> BaseException:
    """The first real error of nested groups; of a rank's, the one that was raised there."""
    while True:
        if isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        elif isinstance(error, RayTaskError) and isinstance(error.cause, BaseException):
            error = error.cause
        else:
            return error


def first_line(error: BaseException) -> str:
    """What went wrong, on one line; of an error that a person can act on, what to do too."""
    if isinstance(error, UnserializableException):  # Ray has kept its traceback alone
        lines = [line for line in str(error).splitlines() if _LAST.match(line)]
        return lines[-1] if lines else type(error).__name__
    if isinstance(error, UserError):
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}".rstrip(": ")


async def drive(run: RunDir, journal: Journal, number: int) -> dict[str, Any]:
    """One attempt; returns what `exit.json` says."""
    attempt = Attempt(run, journal, number)
    task = asyncio.ensure_future(attempt.run())
    loop = asyncio.get_running_loop()
    # Ray installs a handler of its own in ray.init, so this one has to come after it.
    for number_ in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number_, attempt.interrupt)
    try:
        await task
    except Interrupted:
        return {"state": "interrupted", "detail": "asked to stop", "step": attempt.step}
    except Exception as error:
        log.error("%s", traceback.format_exc())
        cause = innermost(error)
        # Another attempt may cure what died or was out of reach, but not what a person must change.
        state = "failed" if isinstance(cause, FINAL_ERRORS) else "interrupted"
        return {"state": state, "detail": first_line(cause), "step": attempt.step}
    finally:
        await attempt.close()
    return {"state": "completed", "detail": "", "step": attempt.step}


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    run = RunDir(args.run)
    directory = run.attempt_dir(args.attempt)
    redirect_output(directory / "driver.log")
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)

    import ray

    ray.init(address="auto", log_to_driver=True, logging_level=logging.WARNING)
    journal = Journal(run.journal)
    ending = asyncio.run(drive(run, journal, args.attempt))
    write_json(directory / "exit.json", ending)
    journal.append("run_ended", state=ending["state"], detail=ending["detail"])
    journal.close()
    ray.shutdown()
    return 0 if ending["state"] == "completed" else 1


if __name__ == "__main__":
    sys.exit(main())
