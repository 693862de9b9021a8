"""The rollout loop's rules, with a scripted runner in place of sandboxes and engines."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from miles_core.config.schema import RolloutConfig
from miles_core.data.source import Row
from miles_core.rollout.loop import EmptyStepError, RolloutLoop
from miles_core.rollout.trajectory import Place, Trajectory
from miles_core.runs.journal import Journal, read
from miles_core.verdicts import Cause, Verdict

SAMPLE = {"tokens": [1, 2], "loss_mask": [0, 1], "logprobs": [0.0, -0.5], "turns": []}


class ScriptedRunner:
    """Answers each place with the next verdict of its script; the last one repeats."""

    def __init__(self, script):
        self.script = script
        self.calls: Counter[Place] = Counter()
        self.running = self.most = 0

    async def run(self, place: Place, row: Row, attempt: int) -> Trajectory:
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)
        verdicts = self.script(place)
        verdict = verdicts[min(self.calls[place], len(verdicts) - 1)]
        self.calls[place] += 1
        self.running -= 1
        trial_id = f"s{place.step:04d}-{place.group_id[-3:]}-m{place.member}-k{attempt}"
        samples = [SAMPLE] if verdict.trainable else []
        return Trajectory(trial_id, place, attempt, verdict, samples, model_calls=1)


def graded(reward: float = 1.0) -> Verdict:
    return Verdict.graded(reward, {"reward": reward})


def lost(cause: Cause = Cause.SANDBOX_FAILED) -> Verdict:
    return Verdict.no_verdict(cause, "scripted")


def rows(count: int) -> list[Row]:
    return [Row(f"do {i}", f"task-{i}", "mini-swe-agent", {}, i) for i in range(count)]


def make(tmp_path: Path, script, concurrency: int = 4, **settings):
    config = RolloutConfig(
        num_rollout=1, n_samples_per_prompt=4, **{"no_verdict_window": 1000, **settings}
    )
    runner = ScriptedRunner(script)
    journal = Journal(tmp_path / "journal.jsonl")
    return RolloutLoop(config, runner, journal, tmp_path / "trials", concurrency), runner


def events(tmp_path: Path, name: str) -> list[dict]:
    return [e for e in read(tmp_path / "journal.jsonl") if e["event"] == name]


async def test_every_place_is_run_once_and_groups_keep_the_order_of_the_rows(tmp_path):
    loop, runner = make(tmp_path, lambda place: [graded(place.member)], concurrency=3)
    groups = await loop.run_step(0, rows(5))
    assert [g.instance_id for g in groups] == [f"task-{i}" for i in range(5)]
    assert [g.rewards for g in groups] == [[0.0, 1.0, 2.0, 3.0]] * 5
    assert set(runner.calls.values()) == {1}
    assert runner.most == 3


async def test_a_place_without_verdict_is_tried_again_and_its_siblings_are_not(tmp_path):
    loop, runner = make(
        tmp_path, lambda place: [lost(), graded()] if place.member == 2 else [graded()]
    )
    (group,) = await loop.run_step(0, rows(1))
    assert len(group.trajectories) == 4
    assert sorted(runner.calls.values()) == [1, 1, 1, 2]
    assert [e["kind"] for e in events(tmp_path, "trial_ended")].count("no_verdict") == 1


async def test_a_group_goes_on_without_a_lost_member_and_never_gives_it_a_reward(tmp_path):
    loop, runner = make(
        tmp_path, lambda place: [lost()] if place.member == 0 else [graded(0.5)], max_attempts=2
    )
    (group,) = await loop.run_step(0, rows(1))
    assert [t.place.member for t in group.trajectories] == [1, 2, 3]
    assert group.rewards == [0.5, 0.5, 0.5]
    assert max(runner.calls.values()) == 2


async def test_a_group_below_its_least_size_is_dropped_and_the_others_stay(tmp_path):
    def script(place):
        return [graded()] if place.instance_id != "task-1" or place.member == 0 else [lost()]

    loop, _ = make(tmp_path, script, min_group_size=2, max_attempts=1)
    groups = await loop.run_step(0, rows(3))
    assert [g.instance_id for g in groups] == ["task-0", "task-2"]
    (dropped,) = events(tmp_path, "group_dropped")
    assert dropped["group_id"] == "s0000-g01"


async def test_a_step_without_any_group_is_an_error(tmp_path):
    loop, _ = make(tmp_path, lambda place: [lost()], max_attempts=1)
    with pytest.raises(EmptyStepError):
        await loop.run_step(0, rows(2))


async def test_a_policy_failure_is_trained_with_reward_zero(tmp_path):
    failed = Verdict.policy_failed(Cause.TURN_LIMIT)
    loop, runner = make(tmp_path, lambda place: [failed])
    (group,) = await loop.run_step(0, rows(1))
    assert group.rewards == [0.0] * 4
    assert set(runner.calls.values()) == {1}


async def test_after_a_restart_ended_trials_are_used_and_lost_ones_run_again(tmp_path):
    first, _ = make(
        tmp_path, lambda place: [graded(7)] if place.member < 2 else [lost()], max_attempts=1
    )
    await first.run_step(3, rows(2))
    second, runner = make(tmp_path, lambda place: [graded(1)])
    groups = await second.run_step(3, rows(2))
    assert [g.rewards for g in groups] == [[7.0, 7.0, 1.0, 1.0]] * 2
    assert all(place.member >= 2 for place in runner.calls)
    assert sum(e["reused"] for e in events(tmp_path, "trial_ended")) == 4


async def test_ended_trials_of_another_step_or_task_are_not_used(tmp_path):
    first, _ = make(tmp_path, lambda place: [graded(7)])
    await first.run_step(0, rows(1))
    second, runner = make(tmp_path, lambda place: [graded(1)])
    await second.run_step(1, rows(1))
    other = [Row("x", "another", "mini-swe-agent", {}, 0)]
    await second.run_step(0, other)
    assert sum(runner.calls.values()) == 8


async def test_an_outage_holds_trials_back_and_costs_no_attempts(tmp_path):
    healthy_after = 30
    seen = Counter()

    def script(place):
        seen["calls"] += 1
        return [graded()] if seen["calls"] > healthy_after else [lost()]

    loop, _ = make(
        tmp_path, script, no_verdict_window=4, max_attempts=2, outage_wait_s=0.01, concurrency=8
    )
    loop._runner.run = _fresh(script)  # each call asks the script anew
    groups = await loop.run_step(0, rows(2))
    assert events(tmp_path, "alarm")[0]["kind"] == "outage"
    assert [len(g.trajectories) for g in groups] == [4, 4]


def _fresh(script):
    async def run(place, row, attempt):
        await asyncio.sleep(0.001)  # so that places take turns, as real trials do
        verdict = script(place)[0]
        samples = [SAMPLE] if verdict.trainable else []
        trial_id = f"s{place.step:04d}-{place.group_id}-m{place.member}-k{attempt}"
        return Trajectory(trial_id, place, attempt, verdict, samples)

    return run


async def test_an_outage_fails_the_run_when_told_to(tmp_path):
    loop, _ = make(
        tmp_path, lambda place: [lost()], no_verdict_window=4, on_outage="fail", max_attempts=50
    )
    with pytest.raises(ExceptionGroup) as caught:
        await loop.run_step(0, rows(2))
    assert "sandbox_failed" in str(_innermost(caught.value))


def _innermost(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def test_an_evaluation_runs_each_row_and_is_never_mixed_with_the_step(tmp_path):
    loop, runner = make(tmp_path, lambda place: [graded(place.member)])
    trajectories = await loop.evaluate(2, rows(3), samples=2)
    assert len(trajectories) == 6
    assert {t.place.group_id for t in trajectories} == {"s0002-e00", "s0002-e01", "s0002-e02"}
    groups = await loop.run_step(2, rows(3))
    assert all(len(group.trajectories) == 4 for group in groups)
    assert sum(runner.calls.values()) == 18


async def test_what_no_session_can_do_is_told_once_for_each_field(tmp_path):
    loop, runner = make(tmp_path, lambda place: [graded()])
    run = runner.run

    async def ignoring(place: Place, row: Row, attempt: int) -> Trajectory:
        trajectory = await run(place, row, attempt)
        asked = ["seed"] if place.member else ["seed", "n_best"]
        trajectory.session = {"ignored_fields": asked, "retries": 2}
        return trajectory

    runner.run = ignoring
    await loop.run_step(0, rows(2))
    told = [e["detail"] for e in events(tmp_path, "alarm") if e["kind"] == "fields_ignored"]
    assert " ".join(told).count("seed") == 1 == " ".join(told).count("n_best")
    assert {e["retries"] for e in events(tmp_path, "trial_ended")} == {2}
