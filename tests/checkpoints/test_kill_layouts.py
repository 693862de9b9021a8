"""Two ranks killed while a checkpoint is saved in the background go on as if they had not been."""

import shutil
import sys
from collections import Counter
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from crash_helpers import Crasher, assert_same, effective
from syscall_tracer import SUPPORTED, Point

sys.path.insert(0, str(Path(__file__).parent.parent / "modeling"))
from family_models import make_moe  # noqa: E402

from miles_core.checkpoints.convert import convert_to_torch_dist  # noqa: E402

pytestmark = [
    pytest.mark.skipif(not SUPPORTED, reason="system calls are traced on x86-64 Linux"),
    pytest.mark.slow,
]

# The run saves after 1, 2 and 4 of 9 steps, keeps two, and is killed within the save after 4.
UNTIL, SAVED, KILLED = 9, 2, 4
TMP, OLD, TRACKER = ".tmp-iter_0000004", ".old-iter_0000001", "latest_checkpointed_iteration.txt"
PP, CP = {"pipeline_model_parallel_size": 2}, {"context_parallel_size": 2}
EP = {"expert_model_parallel_size": 2}
LAYOUTS = {"pp": (PP, CP), "cp": (CP, PP), "ep": (EP, PP)}  # and where they go on in another one

# of rank 0 before it publishes, of rank 0 once it has, and of rank 1
BEFORE = [
    f"mkdir {TMP}",
    f"write {TMP}/__0_0.distcp",
    f"write {TMP}/__0_1.distcp",
    f"fsync {TMP}/__0_1.distcp",
    "mkdir training",
    "rmdir training",
    f"open {TMP}/.metadata",
    f"write {TMP}/common.pt",
    f"write {TMP}/hf/config.json",
    f"rename {TMP}/.miles_state.json.tmp -> {TMP}/miles_state.json",
    f"write {TMP}/.MANIFEST.json.tmp",
    f"rename {TMP}/.MANIFEST.json.tmp -> {TMP}/MANIFEST.json",
    f"rename {TMP} -> iter_0000004",
]
PUBLISHED = [
    "fsync .",
    f"write .{TRACKER}.tmp",
    f"rename .{TRACKER}.tmp -> {TRACKER}",
    f"unlink {OLD}/common.pt",
    f"rmdir {OLD}",
]
OF_THE_OTHER = [
    f"open {TMP}/__1_0.distcp",
    f"write {TMP}/__1_0.distcp",
    f"write {TMP}/__1_1.distcp",
    f"fsync {TMP}/__1_0.distcp",
    "mkdir training",
    "rmdir training",
]
RESHARDED = (f"write {TMP}/__0_0.distcp", f"write {TMP}/__1_0.distcp", "fsync .")


@pytest.fixture(scope="module")
def moe_base(crasher: Crasher) -> Path:
    hf = make_moe(crasher.work / "moe-hf", "glm4_moe_lite")
    convert_to_torch_dist(hf, crasher.work / "moe-base")
    return crasher.work / "moe-base"


@pytest.mark.parametrize("one", [False, True], ids=["all", "one"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_killed_within_a_save_in_the_background(
    crasher: Crasher, moe_base: Path, layout: str, one: bool
) -> None:
    """Both ranks at once, or one of them while the other goes on until it notices."""
    here, there = LAYOUTS[layout]
    base = {"base": str(moe_base)} if layout == "ep" else {}
    run = partial(crasher.run, world=2, background=True, changes=here, **base)
    name = f"{layout}-{one}"
    run(f"{name}-plain", until=UNTIL)
    want = crasher.log(f"{name}-plain")
    assert len({step["loss"] for step in want}) == UNTIL
    run(name, until=3, saves=[1, 2])
    for rank, events in ((0, BEFORE + PUBLISHED), (1, OF_THE_OTHER)):
        traced: dict[str, Any] = {"saves": [KILLED], "traced_save": KILLED, "traced_rank": rank}
        crasher.copy(name, f"{name}-{rank}")
        counts = Counter(run(f"{name}-{rank}", until=UNTIL, **traced)["events"])
        for number, event in enumerate(events):
            copy = f"{name}-{rank}-{number}"
            crasher.copy(name, copy)
            point = asdict(Point(event, counts[event] // 2))
            answer = run(copy, until=UNTIL, **traced, point=point, others_notice=one)
            assert answer["killed"], event
            if event in RESHARDED:
                crasher.copy(copy, f"{copy}-there")
                run(f"{copy}-there", until=UNTIL, changes=there)
                assert_same(effective(crasher.log(f"{copy}-there")), want)
            run(copy, until=UNTIL, saves=[KILLED])
            log = crasher.log(copy)
            resumed = [entry for entry in log if "resumed" in entry][-1]
            found = KILLED if event in PUBLISHED else SAVED
            assert resumed == {"resumed": found, "passed_over": []}, event
            assert effective(log) == want, event
            shutil.rmtree(crasher.work / copy)
