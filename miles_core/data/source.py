"""The prompt source: rows in a reproducible order, over as many epochs as a run needs."""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import orjson

from miles_core.data.inputs import RawRow, decode, read_parquet
from miles_core.data.rows import DEFAULT_AGENT, BadRow, DataError, Row, parse_row

_SHOWN = 20


class PromptSource:
    """Rows of a .jsonl or .parquet file, drawn in an order that depends on the seed alone.

    Every epoch has each row once, in a new permutation (or in the order of the file without
    `shuffle`). All rows are checked when the source is made; JSON lines are then read where they
    lie, with eight bytes of memory a row. Raises DataError that names the bad lines.
    """

    def __init__(self, path: str | Path, seed: int = 0, shuffle: bool = True) -> None:
        self.path = Path(path)
        self.seed = seed
        self.shuffle = shuffle
        if not self.path.is_file():
            raise DataError(f"{self.path}: there is no such file of rows", "check --prompt-data")
        parquet = self.path.suffix == ".parquet"
        self._store: _Store = _ParquetStore(self.path) if parquet else _LineStore(self.path)
        self.fingerprint = self._store.fingerprint
        self._epoch = 0
        self._position = 0
        self._order = self._permutation(0)

    def __len__(self) -> int:
        return len(self._store)

    def draw(self, n: int) -> list[Row]:
        """The next `n` rows; goes on into the next epoch at the end of one."""
        rows = []
        for _ in range(n):
            if self._position == len(self):
                self._epoch += 1
                self._position = 0
                self._order = self._permutation(self._epoch)
            index = self._order[self._position]
            rows.append(parse_row(self._store.read(index), index))
            self._position += 1
        return rows

    def state(self) -> dict[str, Any]:
        """Where the source stands, as JSON types."""
        return {
            "fingerprint": self.fingerprint,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "epoch": self._epoch,
            "position": self._position,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken; refuses the state of other rows or another order."""
        for name, own in (
            ("fingerprint", self.fingerprint),
            ("seed", self.seed),
            ("shuffle", self.shuffle),
        ):
            if state[name] != own:
                raise DataError(
                    f"{self.path}: the {name} of the rows is {own}, but the checkpoint was made "
                    f"with {state[name]}",
                    "resume with the rows and the seed that the run started with",
                )
        epoch, position = int(state["epoch"]), int(state["position"])
        if epoch < 0 or not 0 <= position <= len(self):
            raise DataError(f"{self.path}: position {epoch}:{position} is not in the rows")
        self._epoch, self._position = epoch, position
        self._order = self._permutation(epoch)

    def instance_ids(self) -> set[str]:
        """The ids of all rows."""
        return {parse_row(self._store.read(i), i).instance_id for i in range(len(self))}

    def _permutation(self, epoch: int) -> Sequence[int]:
        if not self.shuffle:
            return range(len(self))
        order = array("Q", range(len(self)))
        random.Random(f"{self.seed}/{epoch}").shuffle(order)
        return order


class _Store(Protocol):
    """Random access to decoded rows that were all checked before."""

    fingerprint: str

    def __len__(self) -> int: ...

    def read(self, index: int) -> Any: ...


class _Check:
    """Collects the bad rows of a file and fails with all of them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.good = 0
        self.bad: list[str] = []
        self.count = 0

    def add(self, raw: RawRow, agent: str = DEFAULT_AGENT) -> bool:
        try:
            parse_row(decode(raw), self.good, agent)
        except BadRow as reason:
            self.count += 1
            if len(self.bad) < _SHOWN:
                self.bad.append(f"{self.path}:{raw.line}: {reason}")
            return False
        self.good += 1
        return True

    def finish(self) -> None:
        if self.count:
            more = f"\n... and {self.count - len(self.bad)} more" if self.count > _SHOWN else ""
            raise DataError(
                "\n".join(self.bad) + more,
                "correct the rows, or convert them with `miles data convert`",
            )
        if not self.good:
            raise DataError(f"{self.path}: holds no rows", "check --prompt-data")


class _LineStore:
    """A JSON-lines file: the offset of each line is kept, and its bytes stay on disk."""

    def __init__(self, path: Path) -> None:
        self._offsets = array("Q")
        digest = hashlib.sha256()
        check = _Check(path)
        self._file = open(path, "rb")  # noqa: SIM115 - kept open for as long as the source lives
        offset = 0
        for number, line in enumerate(self._file, 1):
            digest.update(line)
            data = line.strip()
            if data and check.add(RawRow(str(path), number, data)):
                self._offsets.append(offset)
            offset += len(line)
        check.finish()
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._offsets)

    def read(self, index: int) -> Any:
        self._file.seek(self._offsets[index])
        return orjson.loads(self._file.readline())


class _ParquetStore:
    """A Parquet file, held in memory as an Arrow table."""

    def __init__(self, path: Path) -> None:
        import pyarrow.parquet as pq

        check = _Check(path)
        for raw in read_parquet(path):
            check.add(raw)
        check.finish()
        with open(path, "rb") as file:
            self.fingerprint = hashlib.file_digest(file, "sha256").hexdigest()
        self._table = pq.read_table(path)

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def read(self, index: int) -> Any:
        return self._table.slice(index, 1).to_pylist()[0]
