"""`miles checkpoint`: convert, export, verify and inspect sharded checkpoints."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_cli.cli import EXIT_FAILED, print_json
from miles_core.errors import UserError

if TYPE_CHECKING:
    from miles_core.checkpoints.stream import Progress

_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_PROGRESS_S = 1.0


def register(subparsers: Any) -> None:
    """Add `checkpoint` to the command line."""
    parser = subparsers.add_parser("checkpoint", help="convert, export, check and show checkpoints")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    convert = commands.add_parser(
        "convert",
        help="Hugging Face directory to a sharded one that the trainer loads",
        description="Write the model of a Hugging Face directory as a sharded (torch_dist) "
        "directory. Weight by weight, so that memory for the largest ones is enough; a conversion "
        "that was interrupted goes on where it was. What was written is compared with the source.",
    )
    convert.add_argument("source", type=Path, metavar="HF_DIR", help="the model to convert")
    convert.add_argument("out", type=Path, metavar="OUT", help="directory to write")
    convert.add_argument(
        "--check",
        choices=("auto", "logits", "tensors"),
        default="auto",
        help="every tensor is compared bit for bit; logits: also the model's logits with "
        "transformers'; auto: those of the first layers, one of each kind, where they fit into "
        "memory; tensors: no logits",
    )
    convert.add_argument(
        "--workers", type=_positive, default=2, metavar="N", help="weights in memory at once (2)"
    )
    convert.set_defaults(run=_convert)
    export = commands.add_parser(
        "export",
        help="sharded directory to a Hugging Face one",
        description="Write a checkpoint or a converted model as a Hugging Face directory.",
    )
    export.add_argument("source", type=Path, metavar="DIR", help="checkpoint, or folder of them")
    export.add_argument("out", type=Path, metavar="OUT", help="directory to write")
    export.add_argument(
        "--max-shard-size", type=_size, default=4 << 30, metavar="SIZE", help="of a file (4GiB)"
    )
    export.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of the written weights; default: as they are stored",
    )
    export.add_argument(
        "--adapter",
        action="store_true",
        help="write the adapters of a checkpoint for PEFT, instead of merging them into the model",
    )
    export.set_defaults(run=_export)
    verify = commands.add_parser(
        "verify",
        help="check that checkpoints are whole",
        description="Check manifest, digests and index of a checkpoint, or of all in a folder; "
        "with --hf that it holds the model of that Hugging Face directory.",
    )
    verify.add_argument("source", type=Path, metavar="DIR", help="checkpoint, or folder of them")
    verify.add_argument("--hf", type=Path, metavar="HF_DIR", help="compare tensors and logits")
    verify.set_defaults(run=_verify)
    for command in (export, verify):
        command.add_argument(
            "--base",
            type=Path,
            metavar="DIR",
            help="converted model under the adapters of a checkpoint, if it was moved",
        )
    inspect = commands.add_parser(
        "inspect", help="show what a checkpoint holds", description="Show what a checkpoint holds."
    )
    inspect.add_argument("source", type=Path, metavar="DIR", help="checkpoint, or folder of them")
    inspect.add_argument("--tensors", action="store_true", help="list every tensor")
    inspect.set_defaults(run=_inspect)
    for command in (convert, export, verify, inspect):
        command.add_argument("--json", action="store_true", help="print one JSON object")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def _size(text: str) -> int:
    """Bytes of a size such as 500MB or 4GiB."""
    match = re.fullmatch(r"([0-9.]+)\s*([kmg]i?b)?", text.lower())
    try:
        value = int(float(match[1]) * _UNITS[match[2] or ""]) if match else 0
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a size such as 500MB or 4GiB")
    return value


def _for_people(command: Callable[[argparse.Namespace], int]) -> Callable[..., int]:
    """What a person can put right becomes a UserError."""

    @wraps(command)
    def run(args: argparse.Namespace) -> int:
        from miles_core.checkpoints.compare import ConversionError
        from miles_core.checkpoints.stream import Busy

        try:
            return command(args)
        except FileNotFoundError as error:
            raise UserError(str(error), "Check the path.") from error
        except FileExistsError as error:
            raise UserError(str(error), "Choose a path where nothing is.") from error
        except Busy as error:
            raise UserError(str(error), "Wait for it, or choose another path.") from error
        except (ValueError, KeyError, ConversionError) as error:
            text = error.args[0] if isinstance(error, KeyError) else str(error)
            raise UserError(str(text), "`miles checkpoint verify` says what is whole.") from error

    return run


def _reporter() -> Callable[[Progress], None]:
    last = 0.0

    def report(progress: Progress) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < _PROGRESS_S and progress.done < progress.total:
            return
        last = now
        left = progress.seconds_left
        print(
            f"{progress.done} of {progress.total} files   {progress.bytes_done / 1e6:.0f} MB in "
            f"{progress.seconds:.0f} s" + ("" if left is None else f"   about {left:.0f} s left"),
            file=sys.stderr,
            flush=True,
        )

    return report


@_for_people
def _convert(args: argparse.Namespace) -> int:
    from miles_core.checkpoints.convert import convert_to_torch_dist

    result = convert_to_torch_dist(
        args.source, args.out, check=args.check, workers=args.workers, report=_reporter()
    )
    if args.json:
        print_json(asdict(result))
        return 0
    if result.skipped:
        print(f"{result.path} already holds this very model")
    elif result.logit_difference is None:
        print(f"{result.path}: every tensor equals its source")
    else:
        of = "" if result.layers is None else f" of the first {result.layers} layers"
        print(
            f"{result.path}: every tensor equals its source; logits{of} differ by "
            f"{result.logit_difference:.1e} of the largest"
        )
    return 0


@_for_people
def _export(args: argparse.Namespace) -> int:
    from miles_core.checkpoints.contents import checkpoint_of
    from miles_core.checkpoints.export import export_to_hf
    from miles_core.checkpoints.stored_adapters import export_adapter

    source = checkpoint_of(args.source)
    if args.adapter:
        files = export_adapter(source, args.out, args.dtype)
    else:
        files = export_to_hf(
            source, args.out, shard_bytes=args.max_shard_size, dtype=args.dtype, base=args.base
        )
    if args.json:
        print_json({"source": str(source), "path": str(args.out), "files": files})
    else:
        print(f"{args.out}: {len(files)} files of weights from {source}")
    return 0


@_for_people
def _verify(args: argparse.Namespace) -> int:
    from miles_core.checkpoints.contents import checkpoints_of
    from miles_core.checkpoints.verify import verify

    results = [verify(path, args.hf, args.base) for path in checkpoints_of(args.source)]
    if args.json:
        print_json([asdict(result) for result in results])
    else:
        for result in results:
            print(result.path)
            for check in result.checks:
                print(f"  {check.name:<9} {check.problem or check.detail or 'whole'}")
    return 0 if all(result.whole for result in results) else EXIT_FAILED


@_for_people
def _inspect(args: argparse.Namespace) -> int:
    from miles_core.checkpoints.contents import Contents, checkpoint_of, contents

    held: Contents = contents(checkpoint_of(args.source))
    if args.json:
        print_json(asdict(held))
        return 0
    print(f"{held.path}: {held.kind} of a {held.model_type or 'model of unknown type'}")
    for name in (
        "iteration",
        "weight_version",
        "steps",
        "ranks",
        "cursor",
        "fingerprint",
        "adapters",
    ):
        value = getattr(held, name)
        if value is not None:
            print(f"  {name.replace('_', ' '):<15} {value}")
    print(f"\n  {'section':<16} {'entries':>8} {'values':>16} {'MB':>11}  dtypes")
    for section in held.sections:
        dtypes = ", ".join(sorted(section.dtypes)) or "-"
        print(
            f"  {section.name:<16} {section.entries:>8} {section.values:>16,} "
            f"{section.bytes / 1e6:>11.1f}  {dtypes}"
        )
    if args.tensors:
        print()
        for tensor in held.tensors:
            shape = "x".join(str(size) for size in tensor.shape)
            print(f"  {tensor.name}  {shape}  {tensor.dtype}  {tensor.parts} parts")
    return 0
