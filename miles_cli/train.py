"""`miles train`, `miles resume` and `miles stop`."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

from miles_cli.cli import EXIT_FAILED, add_run_argument, find
from miles_core.errors import UserError

if TYPE_CHECKING:
    from miles_core.config.schema import MilesConfig
    from miles_core.runs.directory import RunDir


def register(subparsers: Any) -> None:
    """Add the three commands to the command line."""
    _register_train(subparsers)
    resume = subparsers.add_parser(
        "resume",
        help="go on with a run that ended early",
        description="Go on with a run from its last checkpoint, with its own configuration.",
    )
    add_run_argument(resume)
    resume.set_defaults(run=run_resume)
    stop = subparsers.add_parser(
        "stop",
        help="end a run that is going on",
        description="Cancel a run: end its Ray job, its sandboxes and the services that it "
        "started. Returns when all are gone; can be repeated.",
    )
    add_run_argument(stop)
    stop.set_defaults(run=run_stop)


def _register_train(subparsers: Any) -> None:
    from miles_core.config.flags import add_config_flags

    train = subparsers.add_parser(
        "train",
        help="start a run, or go on with one of the same name",
        description="Train an agent. The same command again after an interruption goes on with "
        "the run.",
    )
    train.add_argument(
        "--new", action="store_true", help="start another run although an unfinished one fits"
    )
    add_config_flags(train)
    train.set_defaults(run=run_train)


def run_train(args: argparse.Namespace) -> int:
    """Start or resume the run that the flags mean."""
    from miles_core.cluster import runs
    from miles_core.config.flags import config_flags
    from miles_core.config.load import load_config

    config = load_config(args.preset, config_flags(args)).config
    if config.run.run_name is None:
        found = None if args.new else runs.unfinished(config)
        if found is not None:
            print(f"going on with the unfinished run {found.path} (--new starts another)")
        name = found.path.name if found is not None else runs.new_name(config)
        config = runs.named(config, name)
    elif args.new and runs.run_path(config).exists():
        raise UserError(
            f"--new, but {runs.run_path(config)} exists",
            "Leave --new out to go on with it, or choose another --run-name.",
        )
    return _drive(config)


def run_resume(args: argparse.Namespace) -> int:
    """Go on with a run."""
    from miles_core.cluster import runs

    run = find(args)
    config = run.load_config()
    parent, name = run.path.parent, run.path.name
    if config.model.cache_dir is None and parent != config.run.runs_dir.absolute():
        print(
            f"the run was moved here from {config.run.runs_dir}: what was prepared for it is "
            f"looked for in {parent / '.cache'}, and made again where it is not"
        )
    section = config.run.model_copy(update={"run_name": name, "runs_dir": parent})
    return _drive(runs.named(config.model_copy(update={"run": section}), name))


def _terminated(_signum: int, _frame: object) -> None:
    raise KeyboardInterrupt


def _drive(config: MilesConfig) -> int:
    """Run the flow with progress; exit status 0 only when the run is complete."""
    from miles_core.cluster import local_client, runs
    from miles_core.cluster.early import check_early
    from miles_core.cluster.stop import stop_run
    from miles_core.cluster.supervise import grant_attempts
    from miles_core.runs.fold import fold
    from miles_core.runs.journal import read
    from miles_core.runs.lock import RunLocked, holder

    check_early(config)
    run = runs.open_run(config)
    owner = holder(run)
    if owner is not None:
        raise RunLocked(run.path, owner)
    if fold(read(run.journal)).completed(config.rollout.num_rollout):
        local_client.stop(run)  # it may have come to its end after its flow was killed
        print(f"{run.path.name} is complete: more steps are asked for with --num-rollout")
    else:
        signal.signal(signal.SIGTERM, _terminated)
        runs.point_latest(run)
        grant_attempts(run)
        try:
            local_client.start(run, config)  # while Prefect is imported and its server starts
            _run_flow(run, config)
        except KeyboardInterrupt:
            owner = holder(run)
            if owner is not None and owner.pid != os.getpid():  # another command's: it lives on
                raise RunLocked(run.path, owner) from None
            print(f"ending {run.path.name} ...", file=sys.stderr)
            stop_run(run, "interrupted", supervisor_wait_s=0.0)
            raise
        owner = holder(run)
        if owner is not None:  # it took the run while this command was starting
            raise RunLocked(run.path, owner)
    return _report(run)


def _run_flow(run: RunDir, config: MilesConfig) -> None:
    from flows.server import prefect_server
    from miles_cli.live import LiveProgress
    from miles_core.cluster.runs import cache_dir

    with LiveProgress(run), prefect_server(cache_dir(config) / "prefect"):
        from flows.train import run_in_foreground

        _quiet_prefect(run)
        run_in_foreground(config)


def _quiet_prefect(run: RunDir) -> None:
    """Prefect's console lines go to a file of the run; the terminal shows the progress."""
    from prefect.logging.handlers import PrefectConsoleHandler

    handler = logging.FileHandler(run.path / "flow.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    for console in [h for h in root.handlers if isinstance(h, PrefectConsoleHandler)]:
        root.removeHandler(console)
    root.addHandler(handler)


def _report(run: RunDir) -> int:
    from miles_cli.live import summary
    from miles_core.runs.status import status

    now = status(run)
    if now.state not in ("completed", "cancelled"):
        print(f"see {run.path}/flow.log and attempts/*/driver.log", file=sys.stderr)
    if now.state == "cancelled":
        print(f"go on with `miles resume {run.path}`", file=sys.stderr)
    print(summary(run))
    if now.state == "completed":
        return 0
    by_signal = now.state == "cancelled" and now.detail in signal.Signals.__members__
    return 128 + signal.Signals[now.detail] if by_signal else EXIT_FAILED


def run_stop(args: argparse.Namespace) -> int:
    """Cancel a run and wait until nothing of it is left."""
    from miles_core.cluster.stop import stop_run
    from miles_core.runs.lock import holder

    run = find(args)
    anything = stop_run(run, "miles stop")
    if holder(run) is not None:
        print(f"the supervisor of {run.path} does not end", file=sys.stderr)
        return EXIT_FAILED
    print(f"{run.path.name}: {'stopped' if anything else 'nothing was running'}")
    return 0
