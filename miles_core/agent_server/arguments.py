"""The flags of `miles-agent-server`, and what can be known to be wrong about them at once."""

from __future__ import annotations

import argparse
import difflib
import os
from pathlib import Path
from typing import NoReturn

from miles_core.errors import UserError
from miles_core.serving import check_ready_file

SECRET = "HARBOR_ADMIN_SECRET"
TASKS = "HARBOR_TASKS_DIR"
MOST = 10_000_000
"""Of every number that is given: 115 days in seconds, ten petabytes in gigabytes."""
LOOPBACK = ("127.0.0.1", "::1", "localhost")


class Parser(argparse.ArgumentParser):
    """An argument parser that names the nearest flag for one that it does not know."""

    def error(self, message: str) -> NoReturn:
        unknown = message.partition("unrecognized arguments: ")[2].split()
        for word in unknown:
            flags = [flag for action in self._actions for flag in action.option_strings]
            near = difflib.get_close_matches(word.split("=")[0], flags, n=1)
            if near:
                message += f"; did you mean {near[0]}?"
        super().error(message)


def parser() -> argparse.ArgumentParser:
    """The command line of the server."""
    made = Parser(
        prog="miles-agent-server",
        description="Run trials of Harbor tasks: sandbox, agent, verifier, verdict.",
        allow_abbrev=False,
    )
    add = made.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    add("--port", type=int, default=8500, help="port; 0: the kernel chooses (%(default)s)")
    add("--ready-file", type=Path, help="written when the server can serve: pid, host, port, url")
    add("--parent-pid", type=int, help="end when this process is gone")
    add(
        "--dashboard-port",
        type=int,
        default=0,
        help="port of the page that shows the trials, on the same address; 0: off (%(default)s)",
    )
    add("--max-concurrent", type=int, default=32, help="sandboxes at once (%(default)s)")
    add(
        "--agent-timeout",
        type=float,
        default=5400.0,
        help="most seconds that an agent may take, whatever its task says (%(default)s)",
    )
    add(
        "--keep-trials",
        type=int,
        default=500,
        help="ended trials that are kept, the newest; a result that no client was given yet is "
        "kept for an hour at least (%(default)s)",
    )
    add("--trials-dir", type=Path, default=Path("trials"), help="results are kept here (trials)")
    add(
        "--tasks-dir",
        type=Path,
        default=os.environ.get(TASKS) or None,
        help="one Harbor task directory per id (default: HARBOR_TASKS_DIR)",
    )
    add(
        "--sandbox",
        default="bubblewrap",
        help="bubblewrap, an environment of Harbor such as docker, or module:Class (%(default)s)",
    )
    add(
        "--images",
        choices=["host", "buildah", "podman"],
        default="host",
        help="what builds the images of the bubblewrap sandbox that the host's own system cannot "
        "stand in for; host: nothing does (%(default)s)",
    )
    add(
        "--images-cache-gb",
        type=float,
        default=20.0,
        help="disk that images of the bubblewrap sandbox may take, in 10^9 bytes (%(default)s)",
    )
    add(
        "--sweep",
        choices=["dry-run", "now"],
        help="start no server: list the sandboxes of --trials-dir that no running trial owns, "
        "and end them (now) or nothing (dry-run)",
    )
    add("--agent-config", type=Path, help="YAML with prompts and limits of mini-swe-agent")
    return made


def check(args: argparse.Namespace) -> None:
    """What can be known to be wrong before anything is loaded; raises UserError."""
    if args.tasks_dir is None:
        raise UserError("no tasks: give --tasks-dir DIR or set HARBOR_TASKS_DIR")
    if not args.tasks_dir.is_dir():
        named = str(args.tasks_dir) == os.environ.get(TASKS)
        raise UserError(
            f"{TASKS if named else '--tasks-dir'} {args.tasks_dir}: no such directory",
            "Name a folder of Harbor tasks with --tasks-dir.",
        )
    for name in ("max_concurrent", "agent_timeout", "images_cache_gb"):
        value = getattr(args, name)
        if not 0 < value <= MOST:
            flag = f"--{name.replace('_', '-')}"
            raise UserError(f"{flag} {value} must be above 0 and at most {MOST}")
    if args.port == args.dashboard_port != 0:
        raise UserError(
            f"--port and --dashboard-port are both {args.port}",
            "The page needs a port of its own; without --dashboard-port there is no page.",
        )
    if args.keep_trials < args.max_concurrent:
        raise UserError(
            f"--keep-trials {args.keep_trials} is below --max-concurrent {args.max_concurrent}: "
            "a result must outlive the trials beside it"
        )
    if args.agent_config is not None and not args.agent_config.is_file():
        raise UserError(f"--agent-config {args.agent_config}: no such file")
    if args.host not in LOOPBACK and not os.environ.get(SECRET):
        raise UserError(
            f"--host {args.host} is reachable from other machines: set {SECRET} to a bearer token, "
            "or listen on 127.0.0.1"
        )
    if args.ready_file is not None:
        check_ready_file(args.ready_file)
    try:
        args.trials_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--trials-dir {args.trials_dir}: {error.strerror or error}") from error
