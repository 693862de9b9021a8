"""`miles data convert`: raw rows to the row format."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

from miles_core.data.rows import DEFAULT_AGENT, DEFAULT_SPLIT, ID_KEYS, PROMPT_KEYS


def register(subparsers: Any) -> None:
    """Add `miles data convert`."""
    parser = subparsers.add_parser("data", help="prepare prompt rows")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    convert = commands.add_parser(
        "convert",
        help="turn Terminal-Bench, SWE-bench or custom rows into rows of the pipeline",
        description="Turn raw rows into rows of the pipeline: a prompt, and metadata with the "
        "task's instance_id and every original field. The output appears whole or not at all.",
    )
    add = convert.add_argument
    add(
        "--input",
        required=True,
        metavar="FILE|FOLDER|DATASET",
        help=".jsonl, .jsonl.gz or .parquet, a folder of these, a dataset saved on disk, or the "
        "name of one for the datasets library",
    )
    add("--output", required=True, type=Path, metavar="FILE", help=".jsonl or .parquet to write")
    add(
        "--agent-name",
        metavar="NAME",
        help=f"agent for every row (default: the row's own, else {DEFAULT_AGENT})",
    )
    add(
        "--prompt-key",
        metavar="PATH",
        help="dotted path of the prompt, such as responses_create_params.input "
        f"(default: the first of {', '.join(PROMPT_KEYS)})",
    )
    add(
        "--id-key",
        metavar="PATH",
        help="dotted path of the task id, such as metadata.task.id "
        f"(default: the first of {', '.join(ID_KEYS)})",
    )
    add(
        "--split",
        metavar="NAME",
        help="split of a dataset to load, and the split to write into every row "
        f"(default: the row's own, else {DEFAULT_SPLIT})",
    )
    add("--limit", type=_positive, metavar="N", help="stop after N rows (default: all)")
    add("--append", action="store_true", help="keep the rows that the output already holds")
    add(
        "--on-bad-row",
        choices=("error", "skip"),
        default="error",
        help="error: list all bad rows and write nothing; skip: leave them out and list them "
        "(default: error)",
    )
    add("--json", action="store_true", help="print the report as one JSON object")
    convert.set_defaults(run=_convert)


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, is {text!r}") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be >= 1, is {value}")
    return value


def _convert(args: argparse.Namespace) -> int:
    from miles_core.data.convert import ConvertOptions, convert

    start = time.perf_counter()
    report = convert(
        ConvertOptions(
            input=args.input,
            output=args.output,
            prompt_key=args.prompt_key,
            id_key=args.id_key,
            agent_name=args.agent_name,
            split=args.split,
            limit=args.limit,
            append=args.append,
            on_bad_row=args.on_bad_row,
        )
    )
    seconds = time.perf_counter() - start
    if args.json:
        print(json.dumps({**dataclasses.asdict(report), "seconds": round(seconds, 3)}, indent=2))
        return 0
    for line in report.bad_rows:
        print(line, file=sys.stderr)
    print(f"{report.rows} rows written to {report.output} in {seconds:.1f} s")
    for count, text in (
        (report.kept_rows, "rows were there before and kept"),
        (report.bad, "bad rows were left out"),
        (report.mapped_ids, "ids were shortened to their last part; metadata.source_id has them"),
        (report.duplicate_ids, "rows repeat the id of an earlier one"),
    ):
        if count:
            print(f"{count} {text}")
    return 0
