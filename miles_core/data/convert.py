"""Conversion of raw rows (Terminal-Bench, SWE-bench, custom) into the row format.

Every line is fully validated, and then its own bytes are spliced into the new row, so that a
value is never changed by being decoded and encoded again. Only the fields that matter here are
decoded, unless the row must be put together anew. Memory does not grow with the size of
rows; about a hundred bytes are kept for each distinct id to find collisions.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

import orjson

from miles_core.data.fields import FieldDecoder
from miles_core.data.inputs import RawRow, decode, read_jsonl, read_parquet, read_raw
from miles_core.data.outputs import check_output, output_lock, parquet_from_jsonl, replacing
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
_OWN_KEYS = ("prompt", "metadata", "instance_id", "agent_name", "split", "source_id")


@dataclass(frozen=True)
class ConvertOptions:
    """What to convert and how.

    `prompt_key` and `id_key` are dotted paths; without them the usual names are tried.
    `agent_name` and `split` replace what a row says; without them a row keeps its own, else gets
    `default_agent` and `train`. `limit` is the number of rows to write. `bad_rows_advice` is
    what the error about bad rows tells to do, in words of the command that was typed.
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
    bad_rows_advice: str = (
        "nothing was written; correct the rows, or leave them out with --on-bad-row skip"
    )


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
    """Which source id each task id came from (as hashes)."""

    def __init__(self) -> None:
        self._sources: dict[int, int] = {}
        self._count = 0

    def add(self, name: str, source: str) -> bool:
        """Whether the id was there before; raises BadRow if it came from another source id."""
        key = hash(name)
        origin = key if source == name else hash(source)
        if self._sources.setdefault(key, origin) != origin:
            raise BadRow(
                f"the id {source!r} becomes {name!r}, and so does another id before it; "
                "make the last parts of the ids unique"
            )
        known = len(self._sources) == self._count
        self._count = len(self._sources)
        return known


def convert(options: ConvertOptions) -> ConvertReport:
    """Convert rows into `options.output`, which appears whole or is left as it was.

    Raises DataError that lists the bad rows (all are counted) unless they are to be skipped, when
    nothing is left to write, and when another process is writing the same output.
    """
    check_output(options.output, options.input)
    report = ConvertReport(str(options.output))
    with output_lock(options.output), replacing(options.output) as out:
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
    converter = _Converter(options, report, ids)
    for raw in read_raw(options.input, options.split):
        if options.limit is not None and report.rows >= options.limit:
            break
        report.bytes_read += len(raw.data) + 1
        try:
            line = converter.line(raw)
        except BadRow as reason:
            report.add_bad(raw, reason)
            continue
        report.rows += 1
        if not report.bad or options.on_bad_row == "skip":
            out.write(line)
    if report.bad and options.on_bad_row == "error":
        raise _bad_rows_error(report, options.bad_rows_advice)
    if not report.rows:
        raise DataError(
            "\n".join([f"{options.input}: no usable row was found", *report.bad_rows]),
            "\n  ".join(["nothing was written; check what the input holds", *report.hints]),
        )


def _bad_rows_error(report: ConvertReport, advice: str) -> DataError:
    """The error that lists the bad rows of a report."""
    lines = list(report.bad_rows)
    if report.bad > len(lines):
        lines.append(f"... and {report.bad - len(lines)} more")
    count = f"{report.bad} of {report.bad + report.rows} rows cannot be used"
    return DataError("\n".join([*lines, count]), "\n  ".join([advice, *report.hints]))


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


class _Found(NamedTuple):
    """What one row becomes: `own` are the fields it has, `added` those that metadata lacks."""

    prompt: Any
    name: str
    source: Any
    own: dict[str, Any]
    added: dict[str, str]
    ready: bool

    def can_be_spliced(self) -> bool:
        return not self.ready and self.added.keys().isdisjoint(self.own)


class _Converter:
    """Turns raw rows into lines of the output and keeps the report and the ids."""

    def __init__(self, options: ConvertOptions, report: ConvertReport, ids: _Ids) -> None:
        self._options = options
        self._report = report
        self._ids = ids
        prompt_keys = (options.prompt_key,) if options.prompt_key else PROMPT_KEYS
        id_keys = (options.id_key,) if options.id_key else ID_KEYS
        self._fields = FieldDecoder((*prompt_keys, *id_keys, *_OWN_KEYS))
        self._may_be_ready = options.prompt_key in (None, "prompt") and options.id_key in (
            None,
            "metadata.instance_id",
        )

    def line(self, raw: RawRow) -> bytes:
        """The line of the output for one raw row; raises BadRow."""
        found = self._from_fields(raw)
        if found is None:
            row = decode(raw)
            if not isinstance(row, dict):
                raise BadRow("is not a JSON object")
            found = self._find(row)
        name, source, own, added = found.name, found.source, found.own, found.added
        origin = own.get("source_id") if found.ready else None
        self._report.duplicate_ids += self._ids.add(name, str(origin or source))
        self._report.mapped_ids += name != source
        if found.can_be_spliced():
            prompt, more = orjson.dumps(found.prompt), orjson.dumps(added)[1:]
            fields = memoryview(raw.data)[:-1]  # without the brace at the end
            comma = b"," if added else b""
            return b"".join((b'{"prompt":', prompt, b',"metadata":', fields, comma, more, b"}\n"))
        made = {"prompt": found.prompt, "metadata": {**own, **added}}
        return orjson.dumps(made, option=orjson.OPT_APPEND_NEWLINE)

    def _from_fields(self, raw: RawRow) -> _Found | None:
        """What the few fields that matter tell; None if the whole row is needed."""
        if raw.error is not None:
            return None
        row = self._fields.decode(raw.data)
        if row is None:
            return None
        try:
            found = self._find(row)
        except BadRow:
            return None  # the reason is to name what else the row has
        return found if found.can_be_spliced() else None

    def _find(self, row: dict[str, Any]) -> _Found:
        ready = self._may_be_ready and is_row(row)
        if ready:
            prompt, source = row["prompt"], row["metadata"]["instance_id"]
            rest = {k: v for k, v in row.items() if k not in ("prompt", "metadata")}
            own = rest | row["metadata"]
        else:
            own = row
            prompt = find_value(row, self._options.prompt_key, PROMPT_KEYS, "--prompt-key")
            source = find_value(row, self._options.id_key, ID_KEYS, "--id-key")
        check_prompt(prompt)
        name = task_id(source)
        return _Found(prompt, name, source, own, self._added(name, source, own), ready)

    def _added(self, name: str, source: Any, own: dict[str, Any]) -> dict[str, str]:
        """The fields that metadata needs beyond, or in place of, the row's own."""
        options = self._options
        agent = options.agent_name or own.get("agent_name") or options.default_agent
        if not isinstance(agent, str):
            raise BadRow("agent_name is not text")
        own_split = own.get("split")
        split = options.split or own_split
        if not isinstance(split, str) or not split:
            split = DEFAULT_SPLIT
        added = {}
        if own.get("instance_id") != name:
            added["instance_id"] = name
        if own.get("agent_name") != agent:
            added["agent_name"] = agent
        if own_split != split:
            added["split"] = split
        if name != source and own.get("source_id") != str(source):
            added["source_id"] = str(source)
        return added
