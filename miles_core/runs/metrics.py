"""metrics.jsonl: one object per step and source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from miles_core.runs.files import LineFile, complete_lines, dumps


def append_metrics(path: str | Path, step: int, source: str, values: dict[str, Any]) -> None:
    """Add the metrics of a step from one source (`rollout`, `train`, ...), durably.

    Non-finite numbers are written as null. `step` and `source` may not be names of metrics.
    """
    clash = {"step", "source"} & values.keys()
    if clash:
        raise ValueError(f"{', '.join(sorted(clash))}: not a name for a metric")
    line = dumps({"step": step, "source": source, **values})
    file = LineFile(path)
    try:
        file.append(lambda _last: line)
    finally:
        file.close()


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """All metrics, ordered by step and source; of a step that was done again the last one."""
    newest: dict[tuple[int, str], dict[str, Any]] = {}
    if Path(path).exists():
        for raw, _ in complete_lines(path):
            row = orjson.loads(raw)
            newest[row["step"], row["source"]] = row
    return [newest[key] for key in sorted(newest)]
