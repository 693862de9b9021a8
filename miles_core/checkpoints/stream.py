"""Conversion weight by weight: memory for the largest one, and a start that can be resumed.

The weights are written group by group (a layer, the embedding) into one file each, which is read
back and compared with the source while the next one is written. `PROGRESS.jsonl` in the unfinished
directory says which files are complete; a later start of the same source goes on behind them.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_core import digest
from miles_core.checkpoints.compare import ConversionError, differing_parts

if TYPE_CHECKING:
    from miles_core.modeling.mapping import Weight
    from miles_core.modeling.sharded_files import ShardFile

PROGRESS_FILE = "PROGRESS.jsonl"
_VERSION = 2
_LAYER = re.compile(r"(decoder\.layers\.\d+)\.")


@dataclass(frozen=True)
class Progress:
    """How far a conversion is: files, bytes of this start, and an estimate of its end, which is
    None until something was converted."""

    done: int
    total: int
    bytes_done: int
    seconds: float
    seconds_left: float | None


Report = Callable[[Progress], None]


class Busy(RuntimeError):
    """Another process works on the same unfinished directory."""


@contextmanager
def unfinished(out: Path, fingerprint: str) -> Iterator[Path]:
    """The directory in which the conversion for `out` grows, for this process alone.

    What an earlier start of the same source left there is kept, anything else removed. It stays
    when the block ends with an interruption. Raises Busy.
    """
    directory = out.with_name(f".partial-{out.name}")
    directory.mkdir(parents=True, exist_ok=True)
    lock = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Busy(f"another process is converting into {out}") from None
        if _source(directory) != fingerprint:
            for path in directory.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            _append(directory, {"version": _VERSION, "fingerprint": fingerprint})
        yield directory
    finally:
        os.close(lock)


def _append(directory: Path, entry: dict[str, object]) -> None:
    with open(directory / PROGRESS_FILE, "a") as file:
        file.write(json.dumps(entry) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _entries(directory: Path) -> list[dict[str, Any]]:
    """The lines of the progress file; one that a crash cut off is taken out of it."""
    path = directory / PROGRESS_FILE
    if not path.is_file():
        return []
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:
        os.truncate(path, len(whole))
    return [json.loads(line) for line in whole.splitlines()]


def _source(directory: Path) -> str | None:
    try:
        entries = _entries(directory)
    except ValueError:
        return None
    if not entries or entries[0].get("version") != _VERSION:
        return None
    return str(entries[0]["fingerprint"])


def _group(weight: Weight) -> str:
    layer = _LAYER.match(weight.ours)
    return layer[1] if layer else weight.ours


class Stream:
    """The weights of a Hugging Face directory, on their way into an unfinished directory."""

    def __init__(self, hf_dir: Path, directory: Path) -> None:
        from miles_core.modeling.families import weights
        from miles_core.modeling.hf_config import read_spec
        from miles_core.modeling.hf_weights import HFReader
        from miles_core.modeling.shard_map import shard_map

        spec = read_spec(hf_dir)
        self._directory = directory
        self._tensor = HFReader(hf_dir)
        self.map = shard_map(spec)
        groups: dict[str, list[Weight]] = {}
        for weight in weights(spec):
            groups.setdefault(_group(weight), []).append(weight)
        self._groups = list(groups.values())
        unfilled = self.map.shapes.keys() - {w.ours for g in self._groups for w in g}
        if unfilled:
            raise ValueError(f"no Hugging Face tensor fills {sorted(unfilled)}")

    def run(self, workers: int, report: Report | None) -> dict[str, tuple[int, str]]:
        """Write what is missing, then the index; size and digest of every shard file.

        Raises ConversionError when what was written is not what the source holds.
        """
        from miles_core.modeling.sharded_files import Item, write_index

        complete = self._complete()
        clock = _Clock(self._elements(), set(complete), report)
        with ThreadPoolExecutor(workers) as pool:
            tasks = {
                pool.submit(self._write, number): number
                for number in range(len(self._groups) + 1)
                if number not in complete
            }
            try:
                for task in as_completed(tasks):
                    entry = task.result()
                    _append(self._directory, entry)
                    clock.tick(tasks[task], entry["size"])
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise
        noted = {entry["number"]: entry for entry in _entries(self._directory)[1:]}
        entries = [noted[number] for number in sorted(noted)]
        items = [Item.of(item) for entry in entries for item in entry["items"]]
        write_index(self._directory, items, common={"extra": {}})
        return {entry["file"]: (entry["size"], entry["digest"]) for entry in entries}

    def _complete(self) -> dict[int, dict[str, Any]]:
        """Entries of the files that an earlier start completed and that are as it left them."""
        complete = {}
        for entry in _entries(self._directory)[1:]:
            path = self._directory / entry["file"]
            if path.is_file() and digest.of_file(path) == entry["digest"]:
                complete[entry["number"]] = entry
        return complete

    def _elements(self) -> list[int]:
        """Number of values of each group; the last one has only empty objects."""
        shapes = self.map.shapes
        return [sum(math.prod(shapes[w.ours]) for w in group) for group in self._groups] + [0]

    def _write(self, number: int) -> dict[str, Any]:
        """Write the file of one group and compare it with the source."""
        from miles_core.modeling.shard_reader import ShardReader
        from miles_core.modeling.sharded_files import ShardFile, index_of

        name = f"__0_{number}.distcp"
        group = self._groups[number] if number < len(self._groups) else []
        with ShardFile(self._directory / name) as file:
            for weight in group:
                self._add(file, weight)
            for key in self.map.objects if number == len(self._groups) else ():
                file.add_object(key, None)
        size, value = file.digest
        stored = ShardReader(self._directory, index_of(file.items))
        for weight in group:
            differing = differing_parts(weight, stored, self.map, self._tensor)
            if differing:
                raise ConversionError(f"tensors of the converted model differ: {differing[0]}")
        items = [item.plain() for item in file.items]
        return {"number": number, "file": name, "size": size, "digest": value, "items": items}

    def _add(self, file: ShardFile, weight: Weight) -> None:
        parts = self._tensor.parts(weight, self.map.shapes[weight.ours])
        value = weight.cut.shard(parts, 0, 1).contiguous()
        for piece in self.map.pieces[weight.ours]:
            file.add(piece.region(value))


class _Clock:
    """Tells `report` how far the groups are."""

    def __init__(self, elements: list[int], complete: set[int], report: Report | None) -> None:
        self._elements, self._report = elements, report
        self._done = set(complete)
        self._before = sum(elements[number] for number in complete)
        self._bytes = 0
        self._started = time.monotonic()
        if report is not None and complete:
            self._tell()

    def tick(self, number: int, size: int) -> None:
        self._done.add(number)
        self._bytes += size
        self._tell()

    def _tell(self) -> None:
        if self._report is None:
            return
        seconds = time.monotonic() - self._started
        now = sum(self._elements[number] for number in self._done)
        speed = (now - self._before) / seconds if seconds > 0 else 0.0
        left = (sum(self._elements) - now) / speed if speed else None
        total = len(self._elements)
        self._report(Progress(len(self._done), total, self._bytes, seconds, left))
