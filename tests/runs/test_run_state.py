"""Fold, status, identity and retention over journals written by hand."""

from pathlib import Path
from typing import Any

import pytest

from miles_core.config.layout import LayoutFields
from miles_core.config.schema import MilesConfig
from miles_core.errors import UserError
from miles_core.runs.directory import RunDir, find_run
from miles_core.runs.files import dumps, write_json
from miles_core.runs.fold import RunState, fold
from miles_core.runs.identity import ALLOWED, changes, refuse_other_run
from miles_core.runs.lock import run_lock
from miles_core.runs.retention import prune
from miles_core.runs.status import status


class Script:
    """Writes events with times of our choice."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def __call__(self, time: float, event: str, **fields: Any) -> None:
        seq = len(self.events) + 1
        self.events.append({"seq": seq, "time": time, "event": event, **fields})

    def started(self, time: float, attempt: int, from_step: int, total: int = 3) -> None:
        self(time, "run_started", attempt=attempt, from_step=from_step, steps_total=total)

    def trial(self, time: float, step: int, name: str, kind: str = "graded", **more: Any) -> None:
        group = f"s{step}"
        self(time, "trial_started", step=step, group_id=group, trial_id=name)
        self(time, "trial_ended", step=step, group_id=group, trial_id=name, kind=kind, **more)

    def trained(self, time: float, step: int, reward: float | None) -> None:
        self(time, "step_trained", step=step, metrics={"reward_mean": reward})

    def write(self, run: RunDir) -> None:
        run.journal.write_bytes(b"".join(dumps(e) + b"\n" for e in self.events))


@pytest.fixture
def run(tmp_path: Path, small_config: MilesConfig) -> RunDir:
    run = RunDir.create(tmp_path / "run", small_config, {"data": "d1", "tasks": "t1"})
    write_json(run.run_json, {**run.identity(), "created": 1000.0})
    return run


def test_fold_counts_steps_trials_and_verdicts() -> None:
    script = Script()
    script.started(10, 1, 0)
    script(11, "stage", name="rollout", state="started", step=0)
    script.trial(12, 0, "a")
    script.trial(12, 0, "b", "policy_failed", cause="turn_limit")
    script.trial(12, 0, "c", "no_verdict", cause="sandbox_failed")
    script(13, "trial_started", step=0, group_id="s0", trial_id="d")
    state = fold(script.events)
    assert (state.stage, state.step) == ("rollout", 0)
    assert dict(state.trials) == {
        "graded": 1, "policy_failed": 1, "no_verdict": 1, "running": 1,
    }  # fmt: skip
    script(
        14, "trial_ended", step=0, group_id="s0", trial_id="d", kind="graded", cause="agent_timeout"
    )
    script(14, "stage", name="rollout", state="ended", step=0, seconds=3.0)
    script.trained(15, 0, 0.5)
    script(16, "weights_pushed", version=1, step=0)
    script(17, "stage", name="rollout", state="started", step=1)
    state = fold(script.events)
    assert state.verdicts == {"graded": 2, "turn_limit": 1, "sandbox_failed": 1}
    assert (state.steps_done, state.reward_mean, state.weight_version) == (1, [0.5], 1)
    assert state.stage_seconds == {"rollout": 3.0}
    assert not state.trials


def test_rollback_forgets_steps_from_the_checkpoint_on_and_reused_trials_count_once() -> None:
    script = Script()
    script.started(10, 1, 0)
    for step, reward in enumerate((0.1, 0.2)):
        script.trial(11, step, f"t{step}")
        script.trained(12, step, reward)
    script.trial(13, 2, "u")
    script(13, "trial_started", step=2, group_id="s2", trial_id="lost")
    script(14, "run_ended", state="interrupted", detail="SIGTERM")
    script.started(20, 2, 1)
    state = fold(script.events)
    assert (state.state, state.attempt, state.reward_mean) == ("running", 2, [0.1])
    assert not state.trials
    script.trial(21, 1, "t1-again")
    script.trained(22, 1, 0.3)
    script(23, "trial_ended", step=2, group_id="s2", trial_id="u", kind="graded", reused=True)
    script.trained(24, 2, None)
    script(25, "run_ended", state="completed", detail="")
    state = fold(script.events)
    assert state.reward_mean == [0.1, 0.3, None]
    assert state.verdicts == {"graded": 4}  # t0, t1, u, t1-again
    assert state.state == "completed"


def test_a_stage_that_ends_late_does_not_revive_a_run() -> None:
    script = Script()
    script.started(1, 1, 0)
    script(2, "run_ended", state="failed", detail="x")
    script(3, "stage", name="services", state="ended", seconds=1.0)
    assert fold(script.events).state == "failed"
    script(4, "stage", name="data", state="skipped")
    assert fold(script.events).state == "running"


def test_status_of_a_running_then_silent_run(run: RunDir) -> None:
    limit, grace = 1800, 900
    assert status(run, 1000 + limit + grace - 1).state == "running"
    assert status(run, 1000 + limit + grace + 1).state == "stalled"
    script = Script()
    script.started(2000, 1, 0)
    script.write(run)
    assert status(run, 2000 + limit + 1).state == "running"  # the grace of the first step
    script.trained(2100, 0, 0.25)
    script.trained(2160, 1, 0.75)
    script(2161, "alarm", kind="no_signal", detail="why")
    script.write(run)
    shown = status(run, 2170)
    assert shown.state == "running"
    assert (shown.steps_done, shown.steps_total, shown.reward_mean) == (2, 3, [0.25, 0.75])
    assert shown.eta_s == pytest.approx(50)
    assert shown.last_event_age_s == pytest.approx(9)
    assert [a["kind"] for a in shown.alarms] == ["no_signal"]
    stalled = status(run, 2161 + limit + 1)
    assert (stalled.state, stalled.eta_s) == ("stalled", None)


@pytest.mark.parametrize("end", ["completed", "failed", "cancelled", "stalled"])
def test_status_of_an_ended_run_does_not_age(run: RunDir, end: str) -> None:
    script = Script()
    script.started(2000, 1, 0)
    script(2001, "run_ended", state=end, detail="because")
    script.write(run)
    shown = status(run, 9e9)
    assert (shown.state, shown.detail) == (end, "because")


def test_an_interrupted_run_is_running_only_while_it_is_driven(run: RunDir) -> None:
    script = Script()
    script.started(2000, 1, 0)
    script(2001, "run_ended", state="interrupted", detail="SIGTERM")
    script.write(run)
    assert status(run, 2002).state == "stalled"
    with run_lock(run):
        assert status(run, 2002).state == "running"


def test_a_failed_attempt_is_not_the_end_while_a_supervisor_holds_the_run(run: RunDir) -> None:
    script = Script()
    script.started(2000, 1, 0)
    script(2001, "run_ended", state="failed", detail="the engine died")
    script.write(run)
    with run_lock(run):
        assert status(run, 2002).state == "running"
    assert status(run, 2002).state == "failed"


def test_status_of_something_else_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"run\.json"):
        status(tmp_path)


def test_create_refuses_an_existing_run_and_another_runs_folders(
    tmp_path: Path, run: RunDir, small_config: MilesConfig
) -> None:
    with pytest.raises(UserError, match="is a run already"):
        RunDir.create(run.path, small_config, {})
    moved = small_config.model_copy(deep=True)
    moved.run.save_dir = tmp_path / "ckpt"
    moved.run.save_traces_dir = tmp_path / "traces"
    first = RunDir.create(tmp_path / "r1", moved, {})
    reopened = RunDir(first.path)
    assert reopened.checkpoints == tmp_path / "ckpt"
    assert reopened.rollout_path(2) == tmp_path / "traces" / "rollout_data" / "2.pt"
    assert reopened.load_config() == moved
    with pytest.raises(UserError, match="belongs to the run"):
        RunDir.create(tmp_path / "r2", moved, {})
    assert not RunDir(tmp_path / "r2").exists()


def test_a_password_in_a_url_never_reaches_the_disk(
    tmp_path: Path, small_config: MilesConfig
) -> None:
    small_config.agent_server.agent_server_url = "http://me:hunter2@127.0.0.1:1"
    with pytest.raises(UserError, match="password") as caught:
        RunDir.create(tmp_path / "secret", small_config, {})
    assert "hunter2" not in str(caught.value)
    assert not (tmp_path / "secret").exists()


def test_find_run_by_path_name_and_latest(tmp_path: Path, small_config: MilesConfig) -> None:
    run = RunDir.create(tmp_path / "runs" / "one", small_config, {})
    (tmp_path / "runs" / "latest").symlink_to("one")
    runs = tmp_path / "runs"
    for name in (str(run.path), "one", "latest"):
        assert find_run(name, runs).path == run.path
    with pytest.raises(UserError, match="no run named 'two'") as caught:
        find_run("two", runs)
    assert "one" in caught.value.fix


def test_resume_lists_changes_and_refuses_another_run(
    run: RunDir, small_config: MilesConfig
) -> None:
    same = {"data": "d1", "tasks": "t1"}
    new = small_config.model_copy(deep=True)
    assert refuse_other_run(run, new, same) == []
    new.rollout.num_rollout = 5
    new.cluster.stall_seconds = 60
    keys = [change.key for change in refuse_other_run(run, new, same)]
    assert keys == ["rollout.num_rollout", "cluster.stall_seconds"]
    new.training.lr = 1.0
    new.rollout.num_rollout = 2
    with pytest.raises(UserError) as caught:
        refuse_other_run(run, new, {"data": "d2", "tasks": "t1"})
    text = str(caught.value)
    assert "training.lr" in text
    assert "num_rollout" in text
    assert "data: its content" in text
    assert "stall_seconds" not in text
    assert [c.key for c in changes(small_config, new) if c.refused] == [
        "rollout.num_rollout",
        "training.lr",
    ]


def test_a_resume_may_do_what_a_lack_of_memory_or_of_machines_asks_for() -> None:
    """Every field of the layouts, and what messages of dead and silent ranks tell to set."""
    told = ("max_tokens_per_gpu", "recompute", "num_trainer_ranks", "micro_batch_size", "packing")
    layout = [field for field in vars(LayoutFields) if not field.startswith("_")]
    assert "expert_model_parallel_size" in layout
    assert {f"training.{name}" for name in (*told, *layout)} <= ALLOWED
    assert {"cluster.rank_silence_s", "cluster.stop_wait_s"} <= ALLOWED
    known = {f"{part}.{n}" for part, f in MilesConfig.model_fields.items() for n in fields_of(f)}
    assert known > ALLOWED - {"preset"}


def fields_of(part: Any) -> list[str]:
    return list(getattr(part.annotation, "model_fields", {}))


@pytest.mark.parametrize(
    ("resume_from", "left"), [(10, [7, 8, 9]), (4, [4, 5, 6, 7, 8, 9]), (0, list(range(10)))]
)
def test_prune_keeps_the_newest_and_all_that_a_resume_needs(
    run: RunDir, resume_from: int, left: list[int]
) -> None:
    trial_steps = {f"t{step}": step for step in range(10)}
    for step in range(10):
        run.rollout_path(step).write_bytes(b"x")
        run.train_dir(step).mkdir()
        write_json(run.trajectory_path(f"t{step}"), {})
    write_json(run.trajectory_path("unknown"), {})
    done = prune(
        run, steps_done=10, resume_from=resume_from, trial_steps=trial_steps,
        keep_dumps=3, keep_trials=3,
    )  # fmt: skip
    assert sorted(int(p.stem) for p in run.rollout_data.iterdir()) == left
    assert sorted(int(p.name) for p in run.train_data.iterdir()) == left
    assert {p.name for p in run.trials.iterdir()} == {f"t{s}" for s in left} | {"unknown"}
    assert done.dumps == [s for s in range(10) if s not in left]


def test_an_empty_journal_is_a_new_run() -> None:
    state = fold([])
    assert isinstance(state, RunState)
    assert (state.state, state.steps_done, state.reward_mean) == ("new", 0, [])
