"""Writing rows: a JSON-lines or Parquet file that appears whole or not at all."""

from __future__ import annotations

import fcntl
import io
import itertools
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import orjson

from miles_core.data.rows import DataError

_BUFFER = 1 << 18
_FLUSH_EVERY = 4 << 20
_PARQUET_BATCH = 512


class _Flowing(io.FileIO):
    """A file whose bytes start their way to the disk while more of them are made.

    So that the wait for all of them at the end is short. The advice starts the writing of dirty
    pages and returns; it would drop only pages that are clean, which new ones are not.
    """

    _written = 0
    _sent = 0

    def write(self, data: Any, /) -> int:
        count = super().write(data)
        self._written += count
        if self._written - self._sent >= _FLUSH_EVERY:
            size = self._written - self._sent
            os.posix_fadvise(self.fileno(), self._sent, size, os.POSIX_FADV_DONTNEED)
            self._sent = self._written
        return count


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file beside `path` that replaces it when the block ends, and is gone when it fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with io.BufferedWriter(_Flowing(fd, "wb"), _BUFFER) as file:
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


@contextmanager
def output_lock(path: Path, wait: bool = False) -> Iterator[None]:
    """Be the only one who writes `path`, until the block ends or the process does.

    The lock is a hidden file beside it that is gone afterwards. Without `wait` a DataError tells
    at once that another process holds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.with_name(f".{path.name}.lock")
    try:
        fd = _locked(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DataError(
            f"{path}: another conversion is writing this file",
            "wait until it has ended, or choose another --output",
        ) from None
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)  # while it is held, so that no one else's is removed
        os.close(fd)


def _locked(lock: Path, operation: int) -> int:
    """A descriptor that holds the lock; raises BlockingIOError."""
    while True:
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, operation)
            if os.path.samestat(os.fstat(fd), os.stat(lock)):
                return fd
        except FileNotFoundError:
            pass  # its holder removed it just now, as when it is another file: once more
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


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
