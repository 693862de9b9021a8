"""`miles verify RUN`: is every trained token the engine's own?"""

from __future__ import annotations

import argparse
from typing import Any

from miles_cli.cli import EXIT_FAILED, add_run_argument, find, print_json
from miles_core.errors import UserError

_SHOWN = 20


def register(subparsers: Any) -> None:
    """Add `verify` to the command line."""
    parser = subparsers.add_parser(
        "verify",
        help="check that every trained token is the engine's own",
        description="Replay a run's dumps against the engine's own record: each trained token "
        "must have the id and the log-probability that the engine sampled. The run must have "
        "been made with --record-generations true.",
    )
    add_run_argument(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run_verify)


def run_verify(args: argparse.Namespace) -> int:
    """Exit status 0 only when everything was found and is equal."""
    from dataclasses import asdict

    from miles_core.rollout.replay import replay

    run = find(args)
    if not run.engine_log.is_dir():
        raise UserError(
            f"{run.path} holds no record of the engine's generations",
            "Record them with --record-generations true; only embedded engines do.",
        )
    report = replay(run)
    if args.json:
        print_json(asdict(report))
    else:
        print(
            f"{report.steps} steps, {report.trajectories} trajectories, "
            f"{report.trained_tokens} trained tokens: {len(report.problems)} problems"
        )
        for problem in report.problems[:_SHOWN]:
            print(f"  {problem}")
    return EXIT_FAILED if report.problems or not report.trained_tokens else 0
