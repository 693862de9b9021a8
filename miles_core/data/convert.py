"""Conversion of raw rows (Terminal-Bench, SWE-bench, custom) into the row format.

Every line is fully validated, and then its own bytes are spliced into the new row, so that a
value is never changed by being decoded and encoded again. Memory does not grow with the size of
rows; about a hundred bytes are kept for each distinct id to find collisions.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

import orjson

from miles_core.data.inputs import RawRow, decode, read_jsonl, read_parquet, read_raw
from miles_core.data.outputs import check_output, parquet_from_jsonl, replacing
from miles_core.data.rows import (
    DEFAULT_AGENT,
    DEFAULT_SPLIT,
    ID_KEYS,
    PROMPT_KEYS,
    BadRow,
    DataError,
    check_prompt,
    find_value,
    is_row,
    parse_row,
    task_id,
)

SHOWN_BAD_ROWS = 20


@dataclass(frozen=True)
class ConvertOptions:
    """What to convert and how.

    `prompt_key` and `id_key` are dotted paths; without them the usual names are tried.
    `agent_name` and `split` replace what a row says; without them a row keeps its own, else gets
    `default_agent` and `train`. `limit` is the number of rows to write.
    """

    input: str
    output: Path
    prompt_key: str | None = None
    id_key: str | None = None
    agent_name: str | None = None
    default_agent: str = DEFAULT_AGENT
    split: str | None = None
    limit: int | None = None
    append: bool = False
    on_bad_row: Literal["error", "skip"] = "error"


@dataclass
class ConvertReport:
    """What a conversion did. `bad_rows` holds the first ones as `file:line: reason`."""

    output: str
    rows: int = 0
    kept_rows: int = 0
    bad: int = 0
    mapped_ids: int = 0
    duplicate_ids: int = 0
    bytes_read: int = 0
    bad_rows: list[str] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)

    def add_bad(self, row: RawRow, reason: BadRow) -> None:
        self.bad += 1
        if len(self.bad_rows) < SHOWN_BAD_ROWS:
            self.bad_rows.append(f"{row.file}:{row.line}: {reason}")
            if reason.hint and not any(h.split()[1] == reason.hint.split()[1] for h in self.hints):
                self.hints.append(reason.hint)


class _Ids:
    """Which source id each task id came from (as hashes), and how many rows repeat one."""

    def __init__(self) -> None:
        self._sources: dict[int, int] = {}
        self.duplicates = 0

    def add(self, name: str, source: str) -> None:
        key, origin = hash(name), hash(source)
        known = self._sources.setdefault(key, origin)
        if known != origin:
            raise BadRow(
                f"the id {source!r} becomes {name!r}, and so does another id before it; "
                "make the last parts of the ids unique"
            )

    def seen(self, name: str) -> bool:
        return hash(name) in self._sources


def convert(options: ConvertOptions) -> ConvertReport:
    """Convert rows into `options.output`, which appears whole or is left as it was.

    Raises DataError that lists the bad rows (all are counted) unless they are to be skipped, and
    when nothing is left to write.
    """
    check_output(options.output, options.input)
    report = ConvertReport(str(options.output))
    with replacing(options.output) as out:
        if options.output.suffix == ".jsonl":
            _write_rows(options, report, out)
        else:
            _write_parquet(options, report, out)
    return report


def _write_parquet(options: ConvertOptions, report: ConvertReport, out: IO[bytes]) -> None:
    fd, name = tempfile.mkstemp(dir=options.output.parent, prefix=".rows.", suffix=".tmp")
    try:
        with os.fdopen(fd, "wb", 1 << 20) as spool:
            _write_rows(options, report, spool)
        parquet_from_jsonl(Path(name), out)
    finally:
        Path(name).unlink()


def _write_rows(options: ConvertOptions, report: ConvertReport, out: IO[bytes]) -> None:
    ids = _Ids()
    if options.append and options.output.exists():
        _keep_rows(options.output, report, ids, out)
    for raw in read_raw(options.input, options.split):
        if options.limit is not None and report.rows >= options.limit:
            break
        report.bytes_read += len(raw.data) + 1
        try:
            line = _converted(raw, options, report, ids)
        except BadRow as reason:
            report.add_bad(raw, reason)
            continue
        report.rows += 1
        if not report.bad or options.on_bad_row == "skip":
            out.write(line)
    if report.bad and options.on_bad_row == "error":
        raise bad_rows_error(report)
    if not report.rows:
        raise DataError(
            "\n".join([f"{options.input}: no usable row was found", *report.bad_rows]),
            "\n  ".join(["nothing was written", *report.hints]),
        )


def bad_rows_error(report: ConvertReport) -> DataError:
    """The error that lists the bad rows of a report."""
    lines = list(report.bad_rows)
    if report.bad > len(lines):
        lines.append(f"... and {report.bad - len(lines)} more")
    count = f"{report.bad} of {report.bad + report.rows} rows cannot be used"
    return DataError(
        "\n".join([*lines, count]),
        "\n  ".join(
            [
                "nothing was written; correct the rows, or leave them out with --on-bad-row skip",
                *report.hints,
            ]
        ),
    )


def _keep_rows(existing: Path, report: ConvertReport, ids: _Ids, out: IO[bytes]) -> None:
    reader = read_parquet if existing.suffix == ".parquet" else read_jsonl
    for raw in reader(existing):
        try:
            row = parse_row(decode(raw), report.kept_rows)
            ids.add(row.instance_id, str(row.metadata.get("source_id") or row.instance_id))
        except BadRow as reason:
            raise DataError(
                f"{raw.file}:{raw.line}: {reason}",
                "the output exists and is not a file of rows; choose another --output",
            ) from None
        out.write(raw.data + b"\n")
        report.kept_rows += 1


def _converted(raw: RawRow, options: ConvertOptions, report: ConvertReport, ids: _Ids) -> bytes:
    """The line of the output for one raw row; raises BadRow."""
    row = decode(raw)
    if not isinstance(row, dict):
        raise BadRow("is not a JSON object")
    ready = options.prompt_key in (None, "prompt") and is_row(row)
    ready = ready and options.id_key in (None, "metadata.instance_id")
    if ready:
        prompt, source = row["prompt"], row["metadata"]["instance_id"]
        own = {k: v for k, v in row.items() if k not in ("prompt", "metadata")} | row["metadata"]
    else:
        prompt = find_value(row, options.prompt_key, PROMPT_KEYS, "--prompt-key")
        source = find_value(row, options.id_key, ID_KEYS, "--id-key")
        own = row
    check_prompt(prompt)
    name = task_id(source)
    added = _added(name, source, own, options)
    repeated = ids.seen(name)
    ids.add(name, str(own.get("source_id") or source) if ready else str(source))
    report.duplicate_ids += repeated
    report.mapped_ids += name != source
    return _line(raw.data, prompt, own, added, splice=not ready)


def _added(name: str, source: Any, own: dict[str, Any], options: ConvertOptions) -> dict[str, str]:
    """The fields that metadata needs beyond, or in place of, the row's own."""
    agent = options.agent_name or own.get("agent_name") or options.default_agent
    if not isinstance(agent, str):
        raise BadRow("agent_name is not text")
    own_split = own.get("split")
    split = options.split or (own_split if isinstance(own_split, str) and own_split else None)
    wanted = {"instance_id": name, "agent_name": agent, "split": split or DEFAULT_SPLIT}
    if name != source:
        wanted["source_id"] = str(source)
    return {key: value for key, value in wanted.items() if own.get(key) != value}


def _line(
    data: bytes, prompt: Any, own: dict[str, Any], added: dict[str, str], splice: bool
) -> bytes:
    if splice and not any(key in own for key in added):
        extra = b"," + orjson.dumps(added)[1:] if added else b"}"
        return b'{"prompt":%b,"metadata":%b%b}\n' % (orjson.dumps(prompt), data[:-1], extra)
    row = {"prompt": prompt, "metadata": {**own, **added}}
    return orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)
