"""`miles model init`: make and warm-start a small model."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any


def register(subparsers: Any) -> None:
    """Add `miles model init`."""
    parser = subparsers.add_parser("model", help="make and warm-start models")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    init = commands.add_parser(
        "init",
        help="make a small model that solves some of the example tasks",
        description="Make a small Qwen3 with a tokenizer of its own and train it on demonstrations "
        "of the recipe's tasks with made-up names, until it reaches the recipe's share of goals. "
        "The folder appears complete or not at all.",
    )
    init.add_argument(
        "--recipe", type=Path, required=True, metavar="FILE", help="recipe of the model (TOML)"
    )
    place = init.add_mutually_exclusive_group(required=True)
    place.add_argument("--output", type=Path, metavar="DIR", help="folder that gets the model")
    place.add_argument(
        "--cache-dir",
        type=Path,
        metavar="DIR",
        help="folder of models by fingerprint; a complete one is used, not made again",
    )
    init.add_argument("--json", action="store_true", help="print the result as one JSON object")
    init.set_defaults(run=_init)


def _show(progress: dict[str, Any]) -> None:
    success = progress["success"]
    print(
        f"step {progress['step']} of at most {progress['steps']}   loss {progress['loss']:.3f}   "
        + ("" if success is None else f"success {success:.2f}   ")
        + f"{progress['seconds']:.0f} s, at most {progress['eta_s']:.0f} s left",
        file=sys.stderr,
        flush=True,
    )


def _init(args: argparse.Namespace) -> int:
    from miles_cli.cli import print_json
    from miles_core.modelinit.init import ensure_model, init_model

    if args.output is not None:
        info = init_model(args.recipe, args.output, _show)
    else:
        info = ensure_model(args.recipe, args.cache_dir, _show)
    if args.json:
        print_json(dataclasses.asdict(info))
        return 0
    print(
        f"{info.parameters / 1e6:.2f} million parameters, {info.steps} steps in "
        f"{info.seconds:.0f} s, success {info.success or 0.0:.2f}"
    )
    if not info.reached_target:
        print("the share of goals that the recipe asks for was not reached", file=sys.stderr)
    print(info.path)
    return 0
