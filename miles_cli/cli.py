"""What the commands share: the argument parser, the RUN argument, output."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from miles_core.errors import UserError

if TYPE_CHECKING:
    from miles_core.runs.directory import RunDir

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that is closest to a mistyped one, if any is close."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return found[0] if found else None


class UsageError(UserError):
    """The command line is wrong."""


class Parser(argparse.ArgumentParser):
    """argparse without abbreviations; mistakes are UsageErrors that name the nearest flag."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def flags(self) -> list[str]:
        """All flags of this parser."""
        return [flag for action in self._actions for flag in action.option_strings]

    def commands(self) -> dict[str, Parser]:
        """The subcommands of this parser by name."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                return dict(action.choices)
        return {}

    def leaf(self, argv: list[str]) -> Parser:
        """The parser of the subcommand that `argv` names."""
        parser = self
        for word in argv:
            parser = parser.commands().get(word, parser)
        return parser

    def parse(self, argv: list[str]) -> argparse.Namespace:
        """Parse; an unknown flag or an extra word is a UsageError."""
        args, extra = self.parse_known_args(argv)
        if not extra:
            return args
        leaf = self.leaf(argv)
        flag = next((word for word in extra if word.startswith("-")), None)
        if flag is None:
            leaf.error(f"unexpected argument: {extra[0]}")
        flag = flag.split("=", 1)[0]
        close = nearest(flag, leaf.flags())
        hint = f"Did you mean {close}? " if close else ""
        raise UsageError(f"unknown flag {flag}", f"{hint}See `{leaf.prog} --help`.")

    def error(self, message: str) -> NoReturn:
        fix = f"See `{self.prog} --help`."
        if "invalid choice: '" in message:
            word = message.split("invalid choice: '", 1)[1].split("'", 1)[0]
            close = nearest(word, self.commands())
            fix = f"Did you mean {close}? {fix}" if close else fix
        raise UsageError(message, fix)


def add_run_argument(parser: argparse.ArgumentParser) -> None:
    """RUN (`args.run_path`) and --runs-dir; `find` resolves them."""
    parser.add_argument("run_path", metavar="RUN", help="path of a run, its name, or `latest`")
    parser.add_argument(
        "--runs-dir", type=Path, default=Path("runs"), help="folder that holds runs (runs)"
    )


def find(args: argparse.Namespace) -> RunDir:
    """The run that RUN and --runs-dir name; raises UserError when there is none."""
    from miles_core.runs.directory import find_run

    return find_run(args.run_path, args.runs_dir)


def print_json(obj: Any) -> None:
    """Print an object as indented JSON."""
    from miles_core.runs.files import dumps

    sys.stdout.write(dumps(obj, pretty=True).decode())


def print_error(error: UserError) -> None:
    """Print what is wrong and what to do, to stderr."""
    print(f"miles: {error.message}", file=sys.stderr)
    if error.fix:
        print(f"  {error.fix}", file=sys.stderr)
