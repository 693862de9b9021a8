"""`miles status RUN`: what a run is doing, read from its directory."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from miles_cli.cli import add_run_argument, find, print_json
from miles_cli.live import duration, sparkline
from miles_core.runs.status import RunStatus, status

_WATCH_INTERVAL_S = 2.0


def register(subparsers: Any) -> None:
    """Add `status` to the command line."""
    parser = subparsers.add_parser(
        "status",
        help="show what a run is doing",
        description="Show what a run is doing. Reads the run directory and nothing else.",
    )
    add_run_argument(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--watch", action="store_true", help="print again every two seconds until the run ends"
    )
    parser.set_defaults(run=run_status)


def render(shown: RunStatus, path: str) -> str:
    """The status as lines for a person."""
    where = f", step {shown.step}, {shown.stage}" if shown.stage and shown.step is not None else ""
    lines = [
        f"run       {path}",
        f"state     {shown.state}{where}" + (f" ({shown.detail})" if shown.detail else ""),
        f"steps     {shown.steps_done} of {shown.steps_total}, attempt {shown.attempt}",
    ]
    if shown.reward_mean:
        last = [f"{r:.3f}" if r is not None else "-" for r in shown.reward_mean[-5:]]
        lines.append(f"reward    {sparkline(shown.reward_mean)}  last: {' '.join(last)}")
    if shown.trials:
        lines.append(
            "trials    " + ", ".join(f"{n} {state}" for state, n in sorted(shown.trials.items()))
        )
    if shown.verdicts:
        ordered = sorted(shown.verdicts.items(), key=lambda item: (-item[1], item[0]))
        lines.append("verdicts  " + ", ".join(f"{n} {cause}" for cause, n in ordered))
    version = "none yet" if shown.weight_version is None else str(shown.weight_version)
    lines.append(f"weights   version {version}")
    lines.append(f"event     {duration(shown.last_event_age_s)} ago")
    if shown.eta_s is not None and shown.state == "running":
        lines.append(f"ends in   about {duration(shown.eta_s)}")
    lines += [f"alarm     {alarm['kind']}: {alarm['detail']}" for alarm in shown.alarms[-5:]]
    return "\n".join(lines)


def run_status(args: argparse.Namespace) -> int:
    """Print the status once, or until the run has ended."""
    run = find(args)
    while True:
        shown = status(run)
        if args.json:
            print_json(shown.as_dict())
        else:
            if args.watch and sys.stdout.isatty():
                print("\x1b[2J\x1b[H", end="")
            print(render(shown, str(run.path)))
        sys.stdout.flush()
        if not args.watch or shown.state != "running":
            return 0
        time.sleep(_WATCH_INTERVAL_S)
