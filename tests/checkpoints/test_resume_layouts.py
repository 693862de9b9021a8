"""A run that goes on in another layout of ranks, after a kill, has the losses it would have had."""

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from crash_helpers import Crasher, assert_same, effective
from syscall_tracer import SUPPORTED, Point

pytestmark = pytest.mark.skipif(not SUPPORTED, reason="system calls are traced on x86-64 Linux")

UNTIL = 12


@pytest.fixture(scope="module")
def uninterrupted(crasher: Crasher) -> list[dict[str, Any]]:
    return crasher.log("plain")


def test_tp2_killed_goes_on_as_tp1_and_then_as_dp2(
    crasher: Crasher, uninterrupted: list[dict[str, Any]]
) -> None:
    """Five steps are trained in each layout after the one before it."""
    folder = ".tmp-iter_0000004"
    crasher.run("mixed", until=2, world=2, tp=2, saves=[2])
    shard = Point(f"write {folder}/__1_0.distcp", 10)
    killed = crasher.run(
        "mixed",
        until=UNTIL,
        world=2,
        tp=2,
        saves=[4],
        traced_save=4,
        traced_rank=1,
        point=asdict(shard),
    )
    assert killed["killed"]
    crasher.run("mixed", until=7, saves=[7])
    crasher.run("mixed", until=UNTIL, world=2, tp=1)
    log = crasher.log("mixed")
    assert [entry["resumed"] for entry in log if "resumed" in entry] == [2, 2, 7]
    assert_same(effective(log), uninterrupted)


def test_bfloat16_goes_on_from_its_float32_copies(crasher: Crasher) -> None:
    """The weights alone would not do: what they lost by rounding is in the optimizer's copies."""
    half = {"dtype": "bfloat16"}
    crasher.run("half-plain", until=7, changes=half)
    crasher.run("half", until=2, saves=[2], changes=half)
    crasher.run("half", until=7, changes=half)
    log = crasher.log("half")
    assert [entry["resumed"] for entry in log if "resumed" in entry] == [2]
    assert effective(log) == crasher.log("half-plain")


def test_a_critic_goes_on_where_its_policy_does(crasher: Crasher) -> None:
    """Killed while the files are written, and again when all but the name is there."""
    ppo = {"advantage_estimator": "ppo", "lambd": 0.9, "critic_lr": 1e-2, "value_clip": 0.05}
    crasher.run("critic-plain", until=7, changes=ppo)
    want = crasher.log("critic-plain")
    assert len({entry["value_loss"] for entry in want}) == 7
    folder = ".tmp-iter_0000004"
    points = [
        Point(f"write {folder}/__0_1.distcp", 60),
        Point(f"rename {folder} -> iter_0000004", 0),
    ]
    crasher.run("critic", until=2, saves=[2], changes=ppo)
    for point in points:
        plan = {"saves": [4], "traced_save": 4, "point": asdict(point), "changes": ppo}
        assert crasher.run("critic", until=7, **plan)["killed"]
    crasher.run("critic", until=4, saves=[4], changes=ppo)
    crasher.run("critic", until=7, changes=ppo)
    log = crasher.log("critic")
    assert [entry["resumed"] for entry in log if "resumed" in entry] == [2, 2, 2, 4]
    assert effective(log) == want


def test_a_critic_goes_on_in_another_layout(crasher: Crasher) -> None:
    ppo = {"advantage_estimator": "ppo", "lambd": 0.9, "critic_lr": 1e-2}
    crasher.run("critic-one", until=6, changes=ppo)
    crasher.run("critic-two", until=3, world=2, tp=2, saves=[3], changes=ppo)
    crasher.run("critic-two", until=6, changes=ppo)
    got, want = effective(crasher.log("critic-two")), crasher.log("critic-one")
    assert_same(got, want)
    for a, b in zip(got, want, strict=True):
        for name in ("value_loss", "critic_grad_norm", "critic_lr"):
            assert a[name] == pytest.approx(b[name], rel=1e-4, abs=2e-7), (a["step"], name)


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("rank", [0, 1])
def test_two_ranks_killed_at_any_change_go_on_as_two_and_as_one(
    crasher: Crasher, uninterrupted: list[dict[str, Any]], tp: int, rank: int
) -> None:
    name = f"ranks-{tp}-{rank}"
    crasher.run(name, until=2, world=2, tp=tp, saves=[2])
    crasher.copy(name, name + "-plain")
    crasher.run(name + "-plain", until=9, world=2, tp=tp)
    same_layout = effective(crasher.log(name + "-plain"))
    assert_same(same_layout, uninterrupted[:9])
    traced = {"saves": [4], "world": 2, "tp": tp, "traced_save": 4, "traced_rank": rank}
    crasher.copy(name, name + "-traced")
    events = crasher.run(name + "-traced", until=4, **traced)["events"]
    for number, event in enumerate(dict.fromkeys(events)):
        copy = f"{name}-{number}"
        crasher.copy(name, copy)
        point = Point(event, events.count(event) // 2)
        assert crasher.run(copy, until=9, **traced, point=asdict(point))["killed"]
        crasher.copy(copy, copy + "-one")
        crasher.run(copy, until=9, world=2, tp=tp)
        assert effective(crasher.log(copy)) == same_layout, point
        crasher.run(copy + "-one", until=9)
        assert_same(effective(crasher.log(copy + "-one")), uninterrupted[:9])
        for folder in (copy, copy + "-one"):
            shutil.rmtree(crasher.work / folder)


def test_the_files_of_a_checkpoint_are_those_of_its_layout(crasher: Crasher) -> None:
    """Both ranks write, so that the test above is of a checkpoint in parts."""
    crasher.run("parts", until=1, world=2, tp=2, saves=[1])
    folder = crasher.work / "parts" / "checkpoints" / "iter_0000001"
    names = {path.name for path in Path(folder).glob("*.distcp")}
    assert {"__0_0.distcp", "__1_0.distcp"} <= names
