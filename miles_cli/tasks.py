"""`miles tasks check`: may these tasks be trained on?"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from miles_cli.cli import EXIT_FAILED, UsageError, nearest, print_json
from miles_cli.live import tasks_line
from miles_cli.tasks_report import as_json, print_report, skipped_lines
from miles_core.errors import UserError

if TYPE_CHECKING:
    from miles_core.admission.cache import CheckCache
    from miles_core.admission.check import Progress
    from miles_core.admission.report import TaskReport

_OF_OWN_SERVER = {
    "sandbox": "bubblewrap",
    "images": "host",
    "images_cache_gb": None,
    "agent_timeout": 1800.0,
    "trials_dir": None,
    "agent_python": None,
}
"""Flags that say how an own server is started, and their defaults."""
_LINE_S = 5.0
"""Seconds between two lines of progress where no terminal redraws one."""


def register(subparsers: Any) -> None:
    """Add `miles tasks check`."""
    parser = subparsers.add_parser("tasks", help="check Harbor tasks")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    check = commands.add_parser(
        "check",
        help="run each task with a solution, with nothing, and with an agent that cheats",
        description="Check that tasks may be trained on: each parses, its solution gets full "
        "reward, doing nothing does not, a reward that an agent wrote is not taken, and neither "
        "tests nor solution can be seen by the agent. What was checked before and has not changed "
        "is not run again. Exit status 0 only when every task is admitted.",
    )
    _add_arguments(check)
    check.set_defaults(run=run_check)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("dir", metavar="DIR", type=Path, help="folder of Harbor task directories, or one of them")
    add("ids", metavar="IDS", nargs="*", help="only these tasks of the folder (default: all)")
    add("--json", action="store_true", help="print one JSON object")
    add(
        "--agent-server-url",
        metavar="URL",
        help="running agent server whose tasks these are; HARBOR_ADMIN_SECRET has its token "
        "(default: one is started and ended)",
    )
    add(
        "--max-concurrent",
        type=_positive,
        metavar="N",
        help="tasks at once (default: one for each core, at least 2)",
    )
    add(
        "--cache",
        type=Path,
        default=Path("runs/.cache/task_checks.json"),
        metavar="FILE",
        help="results are kept here (default: %(default)s, where `miles train` looks)",
    )
    add("--recheck", action="store_true", help="check what is in the cache, too")
    add("--sandbox", default="bubblewrap", help="kind of an own server (default: %(default)s)")
    add(
        "--images",
        choices=["host", "buildah", "podman"],
        default="host",
        help="what builds the images of an own server (default: %(default)s; see docs)",
    )
    add(
        "--images-cache-gb",
        type=float,
        metavar="GB",
        help="disk that the images of an own server may take; they are kept with --trials-dir",
    )
    add(
        "--agent-timeout",
        type=float,
        default=1800.0,
        metavar="SECONDS",
        help="most that a solution may take on an own server (default: %(default)g)",
    )
    add("--trials-dir", type=Path, metavar="DIR", help="keep the trials of an own server here")
    add("--agent-python", type=Path, metavar="FILE", help="Python of an own server (.venv-agent)")


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, is {text!r}")
    return int(text)


def run_check(args: argparse.Namespace) -> int:
    """Check the tasks that the arguments name."""
    import asyncio

    from miles_core.admission.report import State

    _refuse_of_own_server(args)
    tasks_dir, names, skipped = _selected(args.dir, args.ids)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    began = time.monotonic()
    reports, sandbox = _all_cached(args, tasks_dir, names), _own_kind(args)
    if reports is None:
        with _server(args, tasks_dir) as (url, token):
            reports, sandbox = asyncio.run(_check(args, tasks_dir, names, url, token))
    seconds = time.monotonic() - began
    if args.json:
        print_json(as_json(tasks_dir, sandbox, reports, skipped, seconds))
    else:
        print_report(reports, skipped, seconds)
    return 0 if all(r.state is State.ADMITTED for r in reports) else EXIT_FAILED


def _refuse_of_own_server(args: argparse.Namespace) -> None:
    """Raise UsageError for a flag that says how to start a server, when there is one."""
    if not args.agent_server_url:
        return
    for name, default in _OF_OWN_SERVER.items():
        if getattr(args, name) != default:
            flag = f"--{name.replace('_', '-')}"
            fix = "Give it to the server when it is started, or leave --agent-server-url out."
            raise UsageError(f"{flag} is for a server that this command starts", fix)


def _own_kind(args: argparse.Namespace) -> str:
    """The kind of sandbox of an own server."""
    from miles_core.agent_server.protocol import sandbox_kind

    return sandbox_kind(args.sandbox, args.images)


def _selected(folder: Path, ids: list[str]) -> tuple[Path, list[str], dict[str, list[str]]]:
    """The folder of tasks, the names to check in it, and what else is there, by why it is none."""
    from miles_core.admission.digest import is_task, no_tasks, task_names

    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder", "Name a Harbor task or a folder of them.")
    if is_task(folder):
        if ids:
            raise UsageError(f"{folder} is a task itself", "Leave the ids out.")
        whole = folder.resolve()
        return whole.parent, [whole.name], {}
    known = task_names(folder)
    for name in ids:
        if name not in known:
            close = nearest(name, known)
            hint = f"Did you mean {close}?" if close else f"It has {len(known)} tasks."
            raise UsageError(f"no task {name} in {folder}", hint)
    skipped = no_tasks(folder)
    if not known:
        what = "\n".join(["it holds no task", *skipped_lines(skipped)])
        fix = "A task is a directory with task.toml, instruction.md, environment/ and tests/."
        raise UserError(f"{folder}: {what}", fix)
    return folder.resolve(), sorted(set(ids)) or known, {} if ids else skipped


@contextmanager
def _server(args: argparse.Namespace, tasks_dir: Path) -> Iterator[tuple[str, str | None]]:
    """URL and token of the server to use; an own one lives as long as the block."""
    from miles_core.admission.gate import at_once_here

    if args.agent_server_url:
        yield args.agent_server_url, os.environ.get("HARBOR_ADMIN_SECRET") or None
        return
    from miles_core.cluster.own_agent import OwnAgentServer

    server = OwnAgentServer(
        tasks_dir,
        args.max_concurrent or at_once_here(),
        sandbox=args.sandbox,
        agent_timeout=args.agent_timeout,
        trials_dir=args.trials_dir,
        python=args.agent_python,
        images=args.images,
        images_cache_gb=args.images_cache_gb,
    )
    with server.serve() as known:
        yield known


def _all_cached(
    args: argparse.Namespace, tasks_dir: Path, names: list[str]
) -> list[TaskReport] | None:
    """The reports, when every one is in the cache: no server is needed then."""
    from miles_core.admission.cache import CheckCache
    from miles_core.admission.check import cached_reports

    if args.recheck or args.agent_server_url:
        return None
    known = cached_reports(tasks_dir, CheckCache(args.cache, _own_kind(args)), names)
    return [known[name] for name in names] if len(known) == len(names) else None


async def _check(
    args: argparse.Namespace,
    tasks_dir: Path,
    names: list[str],
    url: str,
    token: str | None,
) -> tuple[list[TaskReport], str]:
    from miles_core.admission.cache import CheckCache
    from miles_core.admission.check import Checker
    from miles_core.admission.gate import at_once_here
    from miles_core.agent_server.client import (
        AgentServerClient,
        AgentServerError,
        AgentServerUnreachable,
    )

    try:
        async with AgentServerClient(url, token) as client:
            health = await client.health()
            await client.tasks()  # the token is right
            kind = health.sandbox_kind
            cache: CheckCache = CheckCache(args.cache, kind)
            at_once = min(args.max_concurrent or at_once_here(), health.capacity)
            with _Line(sys.stderr) as line:
                checker = Checker(client, tasks_dir, cache, at_once, line.show)
                return await checker.check(names, args.recheck), kind
    except AgentServerUnreachable as error:
        fix = "Start it, correct --agent-server-url, or leave it out for an own one."
        raise UserError(f"no agent server answers at {url}: {error}", fix) from error
    except AgentServerError as error:
        fix = "HARBOR_ADMIN_SECRET has to be the secret that the server was started with."
        raise UserError(f"{url}: {error}", fix) from error


class _Line:
    """One line of progress: redrawn on a terminal, else printed now and then."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._terminal = stream.isatty()
        self._last = time.monotonic()
        self._drawn = False

    def __enter__(self) -> _Line:
        return self

    def __exit__(self, *_: object) -> None:
        if self._drawn:
            self._stream.write("\r\033[K")
            self._stream.flush()

    def show(self, progress: Progress) -> None:
        now = time.monotonic()
        text = progress_text(progress)
        if self._terminal:
            self._stream.write(f"\r\033[K{text}")
            self._stream.flush()
            self._drawn = True
        elif now - self._last >= _LINE_S and progress.done < progress.total:
            print(text, file=self._stream, flush=True)
            self._last = now


def progress_text(progress: Progress) -> str:
    """How far the checks are, in one line."""
    return tasks_line(progress.event())
