"""Preparing the rows of a run: converted once, and found again by the content of their input."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_core.data.convert import ConvertOptions, convert
from miles_core.data.inputs import SUFFIXES, input_files, is_saved_dataset
from miles_core.data.outputs import output_lock, replacing
from miles_core.data.rows import DEFAULT_AGENT, DataError

_FORMAT = 1  # raised when the same input would be converted differently
_USUAL_KEYS = {"prompt_key": "prompt", "id_key": "metadata.instance_id"}


@dataclass(frozen=True)
class PreparedData:
    """Rows that are ready: the file, its SHA-256, how many, and whether they were there before."""

    path: Path
    fingerprint: str
    rows: int
    skipped: bool


def prepare_rows(
    prompt_data: Path,
    cache_dir: Path,
    *,
    prompt_key: str = "prompt",
    id_key: str = "metadata.instance_id",
    agent_name: str = DEFAULT_AGENT,
) -> PreparedData:
    """Check and convert `prompt_data` into `cache_dir`, unless the same content was before.

    Rows that have the row format already stay as they are; `agent_name` goes to rows that name
    none. With the usual keys, the other usual names of a prompt and an id are tried too. What is
    found in the cache is used only when it matches its manifest; two runs that prepare the same
    content take turns. Raises DataError.
    """
    if not prompt_data.exists():
        raise DataError(
            f"data.prompt_data: {prompt_data}: there is no such file or folder",
            "set --prompt-data to a .jsonl or .parquet file of rows",
        )
    keys = {
        name: None if value == _USUAL_KEYS[name] else value
        for name, value in (("prompt_key", prompt_key), ("id_key", id_key))
    }
    recipe = {"format": _FORMAT, "agent_name": agent_name, "source": _source(prompt_data), **keys}
    source = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()
    folder = cache_dir / "rows" / source[:16]
    rows, manifest = folder / "rows.jsonl", folder / "manifest.json"
    known = _verified(rows, manifest, source)
    if known is not None:
        return PreparedData(rows, known["sha256"], known["rows"], skipped=True)
    with output_lock(manifest, wait=True):
        known = _verified(rows, manifest, source)  # another run may have made it meanwhile
        if known is not None:
            return PreparedData(rows, known["sha256"], known["rows"], skipped=True)
        manifest.unlink(missing_ok=True)
        report = convert(
            ConvertOptions(
                input=str(prompt_data),
                output=rows,
                prompt_key=keys["prompt_key"],
                id_key=keys["id_key"],
                default_agent=agent_name,
                bad_rows_advice=_advice(prompt_data, keys),
            )
        )
        found: dict[str, Any] = {"source": source, "sha256": _sha256(rows), "rows": report.rows}
        with replacing(manifest) as out:
            out.write(json.dumps(found, indent=2).encode() + b"\n")
    return PreparedData(rows, found["sha256"], report.rows, skipped=False)


def _advice(prompt_data: Path, keys: dict[str, str | None]) -> str:
    """How to train without the bad rows: training itself leaves none out."""
    command = f"miles data convert --input {shlex.quote(str(prompt_data))} --output clean.jsonl"
    train = "clean.jsonl"
    for name, key in keys.items():
        if key is not None:
            command += f" --{name.replace('_', '-')} {shlex.quote(key)}"
            train = "clean.jsonl with the default --prompt-key and --id-key"
    return (
        f"correct the rows, or clean the file first: {command} --on-bad-row skip\n"
        f"  then train on {train}"
    )


def _verified(rows: Path, manifest: Path, source: str) -> dict[str, Any] | None:
    try:
        known = json.loads(manifest.read_bytes())
        whole = known["source"] == source and known["sha256"] == _sha256(rows)
    except (OSError, ValueError, KeyError, TypeError):
        return None  # not there, or not whole: it is made again
    return known if whole else None


def _source(path: Path) -> list[list[str]]:
    """Relative name and digest of every file that is read."""
    if path.is_dir() and is_saved_dataset(path):
        files = sorted(Path(root) / f for root, _, names in os.walk(path) for f in names)
    else:
        files = input_files(path)
    kind = next((s for s in SUFFIXES if path.name.endswith(s)), "")
    return [[f.relative_to(path).as_posix() if f != path else kind, _sha256(f)] for f in files]


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
