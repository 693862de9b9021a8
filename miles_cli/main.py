"""The `miles` command: finds the module of the command that was asked for and runs it."""

from __future__ import annotations

import errno
import importlib
import os
import sys

from miles_cli.cli import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    Parser,
    UsageError,
    nearest,
    print_error,
)
from miles_core.errors import UserError

# command -> (module that registers it, one line of help)
COMMANDS = {
    "train": ("miles_cli.train", "start a run, or go on with one of the same name"),
    "resume": ("miles_cli.train", "go on with a run that ended early"),
    "stop": ("miles_cli.train", "end a run that is going on"),
    "status": ("miles_cli.status", "show what a run is doing, from its directory"),
    "verify": ("miles_cli.verify", "check that every trained token is the engine's own"),
    "config": ("miles_cli.config", "show the resolved configuration and where it comes from"),
    "data": ("miles_cli.data", "convert and check prompt rows"),
    "model": ("miles_cli.model", "make, warm-start and convert models"),
    "checkpoint": ("miles_cli.checkpoint", "convert, export, check and show checkpoints"),
    "tasks": ("miles_cli.tasks", "check that tasks may be trained on"),
    "sessions": ("miles_cli.sessions", "check that a checkpoint's chats are token-exact"),
}


def _overview() -> str:
    lines = ["usage: miles COMMAND ...", "", "Train language-model agents on terminal tasks.", ""]
    lines += ["commands:"]
    lines += [f"  {name:<10}  {text}" for name, (_, text) in COMMANDS.items()]
    lines += [
        "",
        "options:",
        "  -h, --help  show this help",
        "  --version   show the version",
        "",
        "`miles COMMAND --help` explains a command.",
    ]
    return "\n".join(lines)


def build_parser(command: str) -> Parser:
    """The parser with the group of one command; only that group's module is imported."""
    parser = Parser(prog="miles")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    importlib.import_module(COMMANDS[command][0]).register(subparsers)
    return parser


def dispatch(argv: list[str]) -> int:
    """Run a command line; raises UserError for what the person can put right."""
    if not argv:
        print(_overview(), file=sys.stderr)
        return EXIT_USAGE
    first = argv[0]
    if first in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if first == "--version":
        from importlib.metadata import version

        print(f"miles-flow {version('miles-flow')}")
        return 0
    if first not in COMMANDS:
        close = nearest(first, COMMANDS)
        hint = f"Did you mean {close}? " if close else ""
        kind = "flag" if first.startswith("-") else "command"
        raise UsageError(f"unknown {kind} {first}", f"{hint}See `miles --help`.")
    args = build_parser(first).parse(argv)
    status = int(args.run(args))
    sys.stdout.flush()  # a reader that has gone shows here, not while Python ends
    return status


def main(argv: list[str] | None = None) -> int:
    """Entry point of the console script; returns the exit status."""
    try:
        return dispatch(sys.argv[1:] if argv is None else argv)
    except UserError as error:
        print_error(error)
        return EXIT_USAGE
    except KeyboardInterrupt:
        print("miles: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output is gone: nothing more can be said to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except OSError as error:
        if error.filename is None and error.errno != errno.ENOSPC:
            raise  # no file of the person's: a fault of the program
        where = f"{error.filename}: " if error.filename is not None else ""
        fix = "Check that the path exists, is yours to read and write, and has room."
        print_error(UserError(f"{where}{error.strerror}", fix))
        return EXIT_USAGE


if __name__ == "__main__":
    sys.exit(main())
