"""`miles sessions verify`: is a checkpoint's chat family append-only and token-exact?"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_cli.cli import EXIT_FAILED, print_json
from miles_cli.live import duration
from miles_cli.tables import print_table
from miles_cli.tasks_report import plain

if TYPE_CHECKING:
    from miles_core.sessions.verify.report import Check, Report

_COLUMNS = ("check", "result", "held", "failed", "excused", "what it means")


def register(subparsers: Any) -> None:
    """Add `miles sessions verify`."""
    parser = subparsers.add_parser(
        "sessions", help="check how sessions render a checkpoint's chats"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    verify = commands.add_parser(
        "verify",
        help="prove over generated conversations that nothing sampled is ever rewritten",
        description="Find the chat family of a checkpoint and prove on the CPU, over conversations "
        "that are drawn by a seed, that its text only grows at the end, that trained ids are the "
        "sampled ids, that answers are read back as they were, and that the text is that of the "
        "checkpoint's own template, but for known exceptions, which are listed with their reason. "
        "Exit status 0 only when all of it holds.",
    )
    add = verify.add_argument
    add(
        "--tokenizer",
        required=True,
        type=Path,
        metavar="DIR",
        help="directory of a Hugging Face checkpoint, or of its tokenizer alone",
    )
    add(
        "--chat-family",
        default="auto",
        metavar="NAME",
        help="family to check (default: the one that is found by itself)",
    )
    add("--seed", type=int, default=0, metavar="N", help="of the conversations (default: 0)")
    add(
        "--conversations",
        type=_positive,
        default=200,
        metavar="N",
        help="how many to draw (default: %(default)s)",
    )
    add("--json", action="store_true", help="print one JSON object")
    verify.set_defaults(run=run_verify)


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, is {text!r}")
    return int(text)


def run_verify(args: argparse.Namespace) -> int:
    """Check the family that the arguments name."""
    from miles_core.sessions.families import load_family
    from miles_core.sessions.parsers.sglang import sglang_parser
    from miles_core.sessions.verify.check import verify

    family = load_family(args.tokenizer, args.chat_family)
    theirs = sglang_parser(family.name)
    report = verify(family, args.seed, args.conversations, theirs=theirs)
    if args.json:
        print_json(report.to_json())
    else:
        print_report(report)
    return 0 if report.ok else EXIT_FAILED


def print_report(report: Report) -> None:
    """A table of the checks, the exceptions with their reasons, and the first fault of each."""
    print(f"family {report.family} over {report.tokenizer}")
    print(f"stop tokens: {' '.join(map(plain, report.stop_tokens))}")
    print(
        f"cost of a turn: {'that of its new messages' if report.local else 'that of all messages'}"
    )
    print()
    print_table(_COLUMNS, [_row(check) for check in report.checks])
    print()
    for check in report.checks:
        for line in _lines(check):
            print(line)
    ran = [check for check in report.checks if check.ran]
    held, left = sum(check.ok for check in ran), len(report.checks) - len(ran)
    idle = f", {left} had nothing to check" if left else ""
    print(
        f"{report.conversations} conversations of seed {report.seed} in "
        f"{duration(report.seconds)}: {held} of {len(ran)} checks hold{idle}"
    )


def _row(check: Check) -> list[str]:
    result = "failed" if check.failed else "held" if check.passed else "-"
    excused = sum(check.excused.values())
    return [check.name, result, str(check.passed), str(check.failed), str(excused), check.about]


def _lines(check: Check) -> list[str]:
    """The exceptions, notes and the first fault of a check."""
    lines = [f"  {count} excused: {plain(why)}" for why, count in check.excused.items()]
    lines += [f"  note: {plain(note)}" for note in check.notes]
    if check.first is not None:
        fault = check.first
        lines.append(
            f"  first failure: conversation {fault.conversation}, message {fault.message}: "
            f"{plain(fault.what)}"
        )
        lines += [f"    {plain(message)}" for message in fault.messages]
    return [f"{check.name}:", *lines] if lines else []
