from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

# the trainer's helpers make the models that are saved here
sys.path.insert(0, str(Path(__file__).parent.parent / "training"))

if TYPE_CHECKING:
    from crash_helpers import Crasher


@pytest.fixture(scope="session")
def crasher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crasher]:
    """Makes small runs; the run `start` has trained three steps and saved after one and two."""
    from crash_helpers import Crasher
    from crash_run import write_rows
    from trainer_helpers import make_hf

    from miles_core.checkpoints.convert import convert_to_torch_dist

    work = tmp_path_factory.mktemp("crash")
    make_hf(work / "hf")
    convert_to_torch_dist(work / "hf", work / "base")
    write_rows(work / "rows.jsonl")
    crasher = Crasher(work, work / "base", work / "rows.jsonl")
    crasher.run("start", until=3, saves=[1, 2])
    crasher.run("plain", until=12)
    yield crasher
    crasher.close()
