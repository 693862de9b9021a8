"""Tables of results on a terminal."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table as wide as the terminal, where a long last column is cut; elsewhere nothing is."""
    lines = [list(columns), *map(list, rows)]
    widths = [max(len(line[k]) for line in lines) for k in range(len(columns) - 1)]
    room = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line[:-1], widths, strict=True)]
        text = "  ".join([*cells, line[-1]]).rstrip()
        print(text if room is None or len(text) <= room else f"{text[: room - 1]}…")
