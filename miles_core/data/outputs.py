"""Writing rows: a JSON-lines or Parquet file that appears whole or not at all."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import orjson

from miles_core.data.rows import DataError

_BUFFER = 1 << 20
_PARQUET_BATCH = 512


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file beside `path` that replaces it when the block ends, and is gone when it fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(fd, "wb", _BUFFER) as file:
            yield file
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def check_output(path: Path, source: str) -> None:
    """Raise DataError when rows cannot be written to `path` or would replace their `source`."""
    if path.suffix not in (".jsonl", ".parquet"):
        raise DataError(f"{path}: rows are written as .jsonl or .parquet", "change --output")
    if path.is_dir():
        raise DataError(f"{path}: is a folder", "give --output the name of a file")
    if path.exists() and Path(source).exists() and path.samefile(source):
        raise DataError(f"{path}: is the input itself", "give --output another name")


def parquet_from_jsonl(rows: Path, out: IO[bytes]) -> None:
    """Write a JSON-lines file of rows as Parquet with the columns `prompt` and `metadata`.

    The schema is unified over all rows in a first pass, so memory stays at one batch. A field
    that some rows lack is null there.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema: pa.Schema | None = None
    try:
        for batch in _batches(rows):
            found = pa.Table.from_pylist(batch).schema
            if schema is not None:
                found = pa.unify_schemas([schema, found], promote_options="permissive")
            schema = found
        if schema is None:
            schema = pa.schema([("prompt", pa.string()), ("metadata", pa.null())])
        with pq.ParquetWriter(out, schema, compression="zstd") as writer:
            for batch in _batches(rows):
                writer.write_table(pa.Table.from_pylist(batch, schema=schema))
    except (pa.ArrowException, OverflowError) as error:
        raise DataError(
            f"the rows do not fit into one Parquet table: {error}",
            "a field has different types in different rows, or is an empty object; "
            "write .jsonl instead",
        ) from error


def _batches(rows: Path) -> Iterator[list[dict[str, Any]]]:
    with open(rows, "rb") as file:
        while batch := [orjson.loads(line) for line in itertools.islice(file, _PARQUET_BATCH)]:
            yield batch
