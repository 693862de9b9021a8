"""A run that is killed at any moment of a save goes on as if nothing had happened."""

import json
import re
import shutil
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from crash_helpers import Crasher, effective
from syscall_tracer import SUPPORTED, Point

from miles_core.checkpoints import store

pytestmark = pytest.mark.skipif(not SUPPORTED, reason="system calls are traced on x86-64 Linux")

# The run saves after 1, 2 and 4 of 9 steps, keeps two, and is killed within the save after 4.
UNTIL, SAVED, KILLED = 9, 2, 4
TMP, OLD = ".tmp-iter_0000004", "iter_0000001"
TRACKER = "latest_checkpointed_iteration.txt"


def middle(file: str, writes: int = 1) -> Point:
    """Half-way through the writes of a file that takes this many."""
    return Point(f"write {file}", writes // 2)


def replaced(file: str) -> str:
    folder, _, name = file.rpartition("/")
    temporary = f"{folder}/.{name}.tmp" if folder else f".{name}.tmp"
    return f"rename {temporary} -> {file}"


# name -> (where, iteration of the checkpoint that a resume then finds)
POINTS: dict[str, tuple[Point, int]] = {
    "before the folder": (Point(f"mkdir {TMP}", 0), SAVED),
    "within common.pt": (middle(f"{TMP}/common.pt"), SAVED),
    "within the first shard": (middle(f"{TMP}/__0_0.distcp", 12), SAVED),
    "before the first shard is synced": (Point(f"fsync {TMP}/__0_0.distcp", 0), SAVED),
    "within the second shard": (middle(f"{TMP}/__0_1.distcp", 12), SAVED),
    "as the next step begins": (Point("mkdir training", 0, True), SAVED),
    "after the next step": (Point("rmdir training", 0), SAVED),
    "before the shards' index": (Point(f"open {TMP}/.metadata", 0), SAVED),
    "within the shards' index": (middle(f"{TMP}/.metadata"), SAVED),
    "within metadata.json": (middle(f"{TMP}/metadata.json"), SAVED),
    "within hf/config.json": (middle(f"{TMP}/hf/config.json", 2), SAVED),
    "after the cursor has its name": (Point(replaced(f"{TMP}/miles_state.json"), 0, True), SAVED),
    "within the manifest": (middle(f"{TMP}/.MANIFEST.json.tmp"), SAVED),
    "before the manifest has its name": (Point(replaced(f"{TMP}/MANIFEST.json"), 0), SAVED),
    "before the checkpoint has its name": (Point(f"rename {TMP} -> iter_0000004", 0), SAVED),
    "after the checkpoint has its name": (Point(f"rename {TMP} -> iter_0000004", 0, True), KILLED),
    "within the tracker": (middle(f".{TRACKER}.tmp"), KILLED),
    "before the tracker has its name": (Point(replaced(TRACKER), 0), KILLED),
    "after the tracker has its name": (Point(replaced(TRACKER), 0, True), KILLED),
    "while the oldest is removed": (Point(f"unlink .old-{OLD}/common.pt", 0), KILLED),
    "after the oldest is removed": (Point(f"rmdir .old-{OLD}", 0, True), KILLED),
}
SLOW = (
    "before the first shard is synced",
    "before the shards' index",
    "within metadata.json",
    "within hf/config.json",
    "before the manifest has its name",
    "before the tracker has its name",
    "within common.pt",
)
QUICK = [name for name in POINTS if name not in SLOW]


@pytest.fixture(scope="module")
def uninterrupted(crasher: Crasher) -> list[dict[str, Any]]:
    """The steps of a run that is never killed, nor even saves."""
    steps = crasher.log("plain")[:UNTIL]
    assert len({step["loss"] for step in steps}) == UNTIL  # losses that can tell a difference
    return steps


@pytest.fixture(scope="module")
def trace(crasher: Crasher) -> list[str]:
    """Every change of the file system by a whole save."""
    crasher.copy("start", "traced")
    answer = crasher.run("traced", until=KILLED, saves=[KILLED], traced_save=KILLED)
    events: list[str] = answer["events"]
    return events


def check(
    crasher: Crasher,
    folder: str,
    point: Point,
    expected: int | None,
    want: list[dict[str, Any]],
    background: bool = True,
) -> None:
    """Kill a run at the point, resume it, and compare all its steps with `want`."""
    root = crasher.copy("start", folder)
    plan = {"traced_save": KILLED, "point": asdict(point), "background": background}
    answer = crasher.run(folder, until=UNTIL, saves=[KILLED], **plan)
    assert answer["killed"], f"{point} was not reached"
    crasher.run(folder, until=UNTIL, saves=[KILLED], background=background)
    log = crasher.log(folder)
    resumed = [entry for entry in log if "resumed" in entry][-1]
    assert resumed["passed_over"] == []
    if expected is not None:
        assert resumed["resumed"] == expected
    assert UNTIL - resumed["resumed"] >= 5
    assert effective(log) == want
    shutil.rmtree(root.parent)


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_a_run_killed_within_a_save_goes_on_as_if_it_had_not_been(
    crasher: Crasher, uninterrupted: list[dict[str, Any]], name: str
) -> None:
    point, expected = POINTS[name]
    check(crasher, re.sub(r"\W", "-", name), point, expected, uninterrupted)


@pytest.mark.slow
def test_so_does_one_killed_before_or_after_any_change_of_a_save(
    crasher: Crasher, uninterrupted: list[dict[str, Any]], trace: list[str]
) -> None:
    counts = Counter(trace)
    points = [
        Point(name, number, after)
        for name, count in counts.items()
        for number in sorted({0, count // 2, count - 1})
        for after in (False, True)
    ]
    assert len(points) > 100
    for number, point in enumerate(points):
        check(crasher, f"any-{number}", point, None, uninterrupted)


def test_the_traced_save_is_whole_and_files_are_synced_before_they_get_their_names(
    crasher: Crasher, trace: list[str]
) -> None:
    """What a kill cannot show: that the order holds when the power fails too."""
    renames = trace.index(f"rename {TMP} -> iter_0000004")
    found = store.latest(crasher.work / "traced" / "checkpoints")
    assert found is not None and found.iteration == KILLED
    manifest = json.loads((found.path / "MANIFEST.json").read_text())
    for file in manifest["files"]:
        writes = [
            i
            for i, event in enumerate(trace[:renames])
            if event.startswith(f"write {TMP}/")
            and event.removeprefix(f"write {TMP}/")
            in (file, str(Path(file).with_name(f".{Path(file).name}.tmp")), f"{file}.tmp")
        ]
        synced = [i for i, event in enumerate(trace[:renames]) if event == f"fsync {TMP}/{file}"]
        assert writes and synced and max(writes) < max(synced), file
    after = trace[renames:]
    assert after.index("fsync .") < after.index(replaced(TRACKER))
    assert trace.index(f"fsync .{TRACKER}.tmp") < trace.index(replaced(TRACKER))
    removed = next(i for i, event in enumerate(trace) if event.startswith("unlink "))
    assert trace.index(replaced(TRACKER)) < removed


def converted(root: Path) -> dict[str, bytes]:
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and path.name != "common.pt"  # a zip with a random identity
    }


CONVERSION = {
    "within a layer's file": Point("write .partial-out/__0_1.distcp", 10),
    "before a file is noted": Point("write .partial-out/PROGRESS.jsonl", 2),
    "after a file is noted": Point("fsync .partial-out/PROGRESS.jsonl", 2, True),
    "within the index": Point("write .partial-out/.metadata", 0),
    "after the notes are removed": Point("unlink .partial-out/PROGRESS.jsonl", 0, True),
    "before the manifest": Point("write .partial-out/.MANIFEST.json.tmp", 0),
    "before the name": Point("rename .partial-out -> out", 0),
    "after the name": Point("rename .partial-out -> out", 0, True),
}


CONVERSION_SLOW = ("before a file is noted", "after the notes are removed", "after the name")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in CONVERSION_SLOW else [])
        for name in CONVERSION
    ],
)
def test_a_conversion_killed_anywhere_is_completed_by_the_next(crasher: Crasher, name: str) -> None:
    hf, point = crasher.work / "hf", CONVERSION[name]
    plan = {"until": 0, "convert": str(hf), "traced_save": 0}
    folder = re.sub(r"\W", "-", f"convert {name}")
    assert crasher.run(folder, **plan, point=asdict(point))["killed"], f"{point} was not reached"
    root = crasher.work / folder / "checkpoints"
    assert (root / "out").exists() == (name == "after the name")
    crasher.run(folder, **plan)
    assert [path.name for path in root.iterdir()] == ["out"]
    crasher.run("convert-whole", **plan)
    whole = converted(crasher.work / "convert-whole" / "checkpoints" / "out")
    again = converted(root / "out")
    manifests = [json.loads(files.pop("MANIFEST.json")) for files in (whole, again)]
    assert whole == again
    assert manifests[0]["files"].keys() == manifests[1]["files"].keys()
