"""Each process is killed in the middle of step 2; the same command then completes the run."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

VICTIMS = ("driver", "rank", "engine", "session-server", "agent-server", "flow")


def pid_of(run: Path, victim: str, flow_pid: int) -> int:
    """Process id of a part, from what the run has on disk."""
    services = run / "attempts" / "001" / "services"
    if victim == "flow":
        return flow_pid
    if victim == "rank":
        return json.loads((services / "ranks.json").read_text())["pids"][0]
    if victim == "agent-server":
        return json.loads((run / "cluster" / "agent_server.json").read_text())["pid"]
    if victim != "driver":
        return json.loads((services / f"{victim}-0.json").read_text())["pid"]
    wanted = f"miles_core.cluster.driver\0{run}\0".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if wanted in command and b"sh\0" not in command:
            return int(folder.name)
    raise AssertionError("no driver is running")


@pytest.mark.parametrize("victim", VICTIMS)
def test_a_killed_part_costs_no_step(runs, victim):
    name = f"kill-{victim}"
    process = runs.start(name)
    started = lambda: [e for e in runs.events(name, "trial_started") if e["step"] == 1]  # noqa: E731
    runs.wait(lambda: len(started()) >= 6 or process.poll() is not None)
    assert process.poll() is None, runs.output(name)[-3000:]
    os.kill(pid_of(runs.directory / name, victim, process.pid), signal.SIGKILL)
    code = runs.finish(process)
    if code != 0:
        code = runs.finish(runs.start(name))
    assert code == 0, runs.output(name)[-3000:]
    assert runs.status(name)["state"] == "completed"
    assert [e["step"] for e in runs.events(name, "step_trained")] == [0, 1, 2]
    trained = [e for e in runs.events(name, "trial_ended") if e["kind"] != "no_verdict"]
    assert {e["step"] for e in trained} == {0, 1, 2}
    assert runs.left(name) == []


def test_a_stop_saves_what_is_trained_and_a_resume_repeats_nothing(runs):
    flags = ("--save-interval", "3")
    process = runs.start("stopped", *flags)
    started = lambda: [e for e in runs.events("stopped", "trial_started") if e["step"] == 1]  # noqa: E731
    runs.wait(lambda: len(started()) >= 6 or process.poll() is not None)
    os.kill(process.pid, signal.SIGTERM)
    assert runs.finish(process) != 0
    assert runs.status("stopped")["state"] == "cancelled"
    assert runs.left("stopped") == []
    assert [e["iteration"] for e in runs.events("stopped", "checkpoint_saved")] == [1]
    assert runs.finish(runs.start("stopped", *flags)) == 0, runs.output("stopped")[-3000:]
    assert [e["step"] for e in runs.events("stopped", "step_trained")] == [0, 1, 2]
    assert runs.left("stopped") == []


TWO_RANKS = ("--num-trainer-ranks", "2", "--task-check", "off")
LAYOUTS = {
    "dp": TWO_RANKS,
    "tp": (*TWO_RANKS, "--tensor-model-parallel-size", "2"),
    "pp": (*TWO_RANKS, "--pipeline-model-parallel-size", "2"),
}


def in_stage(runs, name, process, stage, step=1):
    """Wait for the begin of a stage."""

    def begun():
        return stage_events(runs, name, stage, "started", step) or process.poll() is not None

    runs.wait(begun, every_s=0.005)
    assert process.poll() is None, runs.output(name)[-3000:]


def stage_events(runs, name, stage, state, step):
    events = runs.events(name, "stage")
    return [e for e in events if (e["name"], e["state"], e.get("step")) == (stage, state, step)]


def rank_pids(runs, name):
    services = runs.directory / name / "attempts" / "001" / "services"
    return json.loads((services / "ranks.json").read_text())["pids"]


@pytest.mark.parametrize(("layout", "stage"), [("tp", "rollout"), ("pp", "train"), ("dp", "push")])
def test_a_killed_rank_of_two_is_named_and_ends_the_attempt_at_once(runs, layout, stage):
    name = f"kill-one-{layout}"
    process = runs.start(name, *LAYOUTS[layout])
    in_stage(runs, name, process, stage)
    pid = rank_pids(runs, name)[1]
    os.kill(pid, signal.SIGKILL)
    killed = time.time()
    assert runs.finish(process) == 0, runs.output(name)[-3000:]
    ending = runs.events(name, "run_ended")[0]
    assert f"trainer rank 1 of 2 (pid {pid} on " in ending["detail"]
    assert "was ended by SIGKILL" in ending["detail"]
    assert ending["time"] - killed < 30  # a collective waits for minutes
    # a step whose checkpoint was being written when the rank died is trained again
    assert {e["step"] for e in runs.events(name, "step_trained")} == {0, 1, 2}
    assert runs.left(name) == []


def stop_in_stage(runs, name, process, stage):
    """SIGTERM to the command while a stage of two ranks goes on: one of them is frozen until the
    driver knows of the stop. Ranks may be frozen before the stage when they are idle till then."""
    frozen = {"train": ("rollout", 1), "save": ("save", 2), "push": ("push", 2)}[stage]
    in_stage(runs, name, process, *frozen)
    pid = rank_pids(runs, name)[1]
    os.kill(pid, signal.SIGSTOP)
    try:
        in_stage(runs, name, process, stage, frozen[1])
        os.kill(process.pid, signal.SIGTERM)
        log = runs.directory / name / "attempts" / "001" / "driver.log"
        runs.wait(lambda: "asked to stop" in log.read_text())
        if stage == "save":
            assert 2 not in [e["iteration"] for e in runs.events(name, "checkpoint_saved")]
        else:
            assert not stage_events(runs, name, stage, "ended", frozen[1])
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize(
    ("stage", "layout"), [("rollout", "dp"), ("train", "tp"), ("save", "pp"), ("push", "tp")]
)
def test_a_stop_in_any_stage_of_two_ranks_saves_and_a_resume_repeats_nothing(runs, stage, layout):
    name = f"stop-{stage}"
    flags = (*LAYOUTS[layout], "--save-interval", "1" if stage == "save" else "3")
    process = runs.start(name, *flags)
    if stage == "rollout":
        in_stage(runs, name, process, stage)
        os.kill(process.pid, signal.SIGTERM)
    else:
        stop_in_stage(runs, name, process, stage)
    assert runs.finish(process) != 0
    assert runs.status(name)["state"] == "cancelled"
    assert runs.left(name) == []
    trained = [e["step"] for e in runs.events(name, "step_trained")]
    saved = [e["iteration"] for e in runs.events(name, "checkpoint_saved")]
    assert trained == list(range(1 if stage == "rollout" else 2))
    assert max(saved) == len(trained), "what was trained is not all saved"
    assert [e["kind"] for e in runs.events(name, "alarm")] == []
    assert runs.finish(runs.start(name, *flags)) == 0, runs.output(name)[-3000:]
    assert [e["step"] for e in runs.events(name, "step_trained")] == [0, 1, 2]
    assert runs.left(name) == []
