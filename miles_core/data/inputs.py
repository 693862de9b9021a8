"""Reading raw rows: JSON lines (also gzip), Parquet, folders of these, and `datasets`."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import orjson

from miles_core.data.rows import DEFAULT_SPLIT, BadRow, DataError

JSONL_SUFFIXES = (".jsonl", ".ndjson", ".jsonl.gz")
SUFFIXES = (*JSONL_SUFFIXES, ".parquet")
_PARQUET_BATCH = 256
_BUFFER = 1 << 18
_HUB_TIMEOUT_S = 5.0
_BOM = b"\xef\xbb\xbf"


class RawRow(NamedTuple):
    """One row as it was found: the file, the line (or row) number from 1, and its JSON bytes.

    `error` says why there are no bytes.
    """

    file: str
    line: int
    data: bytes
    error: str | None = None


def input_files(source: Path) -> list[Path]:
    """The files of an input: itself, or the supported files of a folder in the order of names."""
    if source.is_file():
        if not source.name.endswith(SUFFIXES):
            raise DataError(
                f"{source}: not a kind of file that can be read",
                f"supported: {', '.join(SUFFIXES)}",
            )
        return [source]
    files = sorted(
        f
        for f in source.rglob("*")
        if f.name.endswith(SUFFIXES)
        and f.is_file()
        and not any(part.startswith(".") for part in f.relative_to(source).parts)
    )
    if not files:
        raise DataError(
            f"{source}: the folder holds no rows", f"supported files: {', '.join(SUFFIXES)}"
        )
    return files


def is_saved_dataset(source: Path) -> bool:
    """Whether a folder was written by `save_to_disk` of the `datasets` library."""
    return (source / "dataset_info.json").is_file() or (source / "dataset_dict.json").is_file()


def read_raw(source: str, split: str | None) -> Iterator[RawRow]:
    """All rows of a file, a folder, or a dataset by name; blank lines are no rows.

    Memory stays at one line or one small batch. Raises DataError when the input as a whole
    cannot be read.
    """
    path = Path(source).expanduser()
    if path.is_dir() and is_saved_dataset(path):
        yield from _read_dataset(source, _load_saved(path, split))
    elif path.exists():
        for file in input_files(path):
            if file.name.endswith(".parquet"):
                yield from read_parquet(file)
            else:
                yield from read_jsonl(file)
    elif source.endswith(SUFFIXES) or source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise DataError(f"{source}: there is no such file or folder", "check the path")
    else:
        yield from _read_dataset(source, _load_named(source, split))


def read_jsonl(file: Path) -> Iterator[RawRow]:
    """The non-blank lines of a JSON-lines file."""
    name = str(file)
    number = 0
    try:
        with _open(file) as lines:
            for number, line in enumerate(lines, 1):
                data = (line if number > 1 else line.removeprefix(_BOM)).strip()
                if data:
                    yield RawRow(name, number, data)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        yield RawRow(name, number + 1, b"", f"the gzip file is damaged or cut off: {error}")


def _open(file: Path) -> IO[bytes]:
    if file.name.endswith(".gz"):
        return gzip.open(file, "rb")  # type: ignore[return-value]
    return open(file, "rb", _BUFFER)


def read_parquet(file: Path) -> Iterator[RawRow]:
    """The rows of a Parquet file as JSON."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(file)
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{file}: not a Parquet file: {error}", "check that the file is whole"
        ) from error
    number = 0
    with table:
        for batch in table.iter_batches(batch_size=_PARQUET_BATCH):
            for row in batch.to_pylist():
                number += 1
                yield _encoded(str(file), number, row)


def _load_saved(path: Path, split: str | None) -> Any:
    import datasets

    loaded = datasets.load_from_disk(str(path))
    if isinstance(loaded, datasets.DatasetDict):
        wanted = split or DEFAULT_SPLIT
        if wanted not in loaded:
            raise DataError(
                f"{path}: there is no split {wanted!r}",
                f"it has: {', '.join(loaded)}; take one with `miles data convert --split`",
            )
        return loaded[wanted]
    return loaded


def _load_named(name: str, split: str | None) -> Any:
    if not _hub_answers():
        # Only the local cache can help; the library would retry for half a minute first. It reads
        # the variable when it is imported.
        os.environ["HF_HUB_OFFLINE"] = "1"
    import datasets

    try:
        return datasets.load_dataset(name, split=split or DEFAULT_SPLIT)
    except (OSError, ValueError) as error:  # all that the library raises for what is not there
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(
            f"{name}: not a file or folder, and not a dataset that can be loaded: {first}",
            "check --input, --split and the network",
        ) from error


def _hub_answers() -> bool:
    import httpx

    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        httpx.head(endpoint, timeout=_HUB_TIMEOUT_S)
    except httpx.HTTPError:
        return False
    return True


def _read_dataset(name: str, dataset: Any) -> Iterator[RawRow]:
    for number, row in enumerate(dataset, 1):
        yield _encoded(name, number, row)


def _encoded(file: str, number: int, row: Any) -> RawRow:
    try:
        return RawRow(file, number, orjson.dumps(row, default=_plain))
    except TypeError as error:
        return RawRow(file, number, b"", f"holds a value that JSON cannot: {error}")


def _plain(value: Any) -> Any:
    import datetime
    import decimal

    if isinstance(value, decimal.Decimal):
        return str(value)
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    raise TypeError(type(value).__name__)


def decode(row: RawRow) -> Any:
    """The JSON value of a raw row; raises BadRow with the reason."""
    if row.error is not None:
        raise BadRow(row.error)
    try:
        return orjson.loads(row.data)
    except orjson.JSONDecodeError as error:
        cut = row.data.startswith(b"{") and not row.data.endswith(b"}")
        hint = "; the line is cut off" if cut else ""
        raise BadRow(f"not valid JSON: {error}{hint}") from None
