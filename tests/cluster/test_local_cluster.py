"""The local cluster and the supervision of real Ray jobs, whose driver is the stand-in."""

import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import standin_driver

from miles_core.cluster import local_client, supervise
from miles_core.cluster import local_process as procs
from miles_core.cluster.local import CLUSTER_ID, cluster_dir
from miles_core.cluster.local_ray import temp_dir
from miles_core.cluster.stop import stop_run
from miles_core.cluster.supervise import Supervisor
from miles_core.runs.directory import RunDir
from miles_core.runs.files import read_json
from miles_core.runs.fold import fold
from miles_core.runs.journal import read
from miles_core.runs.lock import run_lock

MakeRun = Callable[..., RunDir]


def supervisor(run: RunDir, **options: Any) -> Supervisor:
    lines: list[str] = []
    found = Supervisor(
        run,
        run.load_config(),
        write=lines.append,
        entrypoint=standin_driver.entrypoint,
        **options,
    )
    found.lines = lines  # type: ignore[attr-defined]
    return found


def trained(run: RunDir) -> list[int]:
    return [e["step"] for e in read(run.journal) if e["event"] == "step_trained"]


def marked(run: RunDir) -> Callable[[], list[procs.Process]]:
    """A look for every process that the run's present guardian started."""
    cluster_id = read_json(cluster_dir(run) / "guardian.json")["cluster_id"]
    return lambda: procs.marked(CLUSTER_ID, cluster_id)


def test_a_crash_is_told_and_the_next_attempt_completes(make_run: MakeRun) -> None:
    run = make_run({"steps": 3, "seconds": 0.1, "crash_at": {"1": 1}})
    one = supervisor(run)
    with pytest.raises(supervise.TrainingCrashed, match="the stand-in breaks"):
        one.follow_attempt()
    look = marked(run)
    assert look()
    one.follow_attempt()
    assert one.complete and trained(run) == [0, 1, 2]
    assert [e["state"] for e in read(run.journal) if e["event"] == "run_ended"] == [
        "interrupted",
        "completed",
    ]
    assert "step 2" in " ".join(one.lines)  # type: ignore[attr-defined]
    for name in ("secrets.json", "ray_token"):
        assert stat.S_IMODE((cluster_dir(run) / name).stat().st_mode) == 0o600
    assert local_client.stop(run)
    assert look() == [] and not temp_dir(run.path).exists()


@pytest.mark.slow
def test_a_stall_stops_the_job_and_attempts_are_bounded(make_run: MakeRun) -> None:
    run = make_run(
        {"steps": 3, "seconds": 0.1, "hang_at": {"1": 1, "2": 1}},
        stall_seconds=3.0,
        first_step_grace_s=3.0,
        max_run_attempts=1,
    )
    one = supervisor(run)
    with pytest.raises(supervise.TrainingStalled):  # it made one step of progress
        one.follow_attempt()
    with pytest.raises(supervise.TrainingFailed, match="No attempt is left"):
        one.follow_attempt()
    assert fold(read(run.journal)).state == "stalled"
    with pytest.raises(supervise.TrainingFailed, match="no progress"):
        supervisor(run).follow_attempt()
    supervise.grant_attempts(run)
    supervisor(run).follow_attempt()
    assert trained(run) == [0, 1, 2]


@pytest.mark.slow
def test_a_second_supervisor_attaches_to_the_live_job(make_run: MakeRun) -> None:
    run = make_run({"steps": 12, "seconds": 1.0})
    code = (
        "import sys; sys.path.insert(0, sys.argv[2]); import standin_driver\n"
        "from miles_core.cluster.supervise import Supervisor\n"
        "from miles_core.runs.directory import RunDir\n"
        "run = RunDir(sys.argv[1])\n"
        "Supervisor(run, run.load_config(), entrypoint=standin_driver.entrypoint).follow_attempt()"
    )
    first = subprocess.Popen([sys.executable, "-c", code, run.path, Path(__file__).parent])
    wait_for(lambda: len(trained(run)) >= 2)
    first.kill()
    first.wait()
    second = supervisor(run)
    second.follow_attempt()
    assert run.last_attempt() == 1 and trained(run) == list(range(12))
    assert any("attached" in line for line in second.lines)  # type: ignore[attr-defined]


def wait_for(condition: Callable[[], bool], timeout_s: float = 90.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["ray", "guardian"])
def test_a_lost_head_or_guardian_is_replaced_for_the_next_attempt(
    make_run: MakeRun, victim: str
) -> None:
    run = make_run({"steps": 4, "seconds": 1.0})
    killed: list[Callable[[], list[procs.Process]]] = []

    def kill(event: dict[str, Any], _state: Any) -> None:
        if event["event"] == "step_trained" and not killed:
            pid = local_client.own_pid(run, victim)
            assert pid is not None
            killed.append(marked(run))
            os.kill(pid, signal.SIGKILL)

    one = supervisor(run, on_event=kill)
    with pytest.raises(supervise.TrainingCrashed):
        one.follow_attempt()
    one.follow_attempt()
    assert one.complete and trained(run) == [0, 1, 2, 3]
    assert local_client.stop(run)
    assert killed[0]() == []


def submit(run: RunDir) -> None:
    """Start the local cluster and the run's job; nobody follows it."""
    local_client.start(run, run.load_config())
    cluster = local_client.wait_ready(run, run.load_config())
    with cluster.jobs() as jobs:
        supervise.attach_or_submit(jobs, run, standin_driver.entrypoint)


@pytest.mark.slow
@pytest.mark.parametrize("supervised", [True, False])
def test_stop_ends_everything_and_can_be_repeated(make_run: MakeRun, supervised: bool) -> None:
    run = make_run({"steps": 60, "seconds": 1.0})
    seen: list[BaseException] = []

    def drive() -> None:
        with run_lock(run, "a test"):
            try:
                supervisor(run).follow_attempt()
            except supervise.RunCancelled as cancel:
                seen.append(cancel)

    if supervised:
        thread = threading.Thread(target=drive)
        thread.start()
    else:
        submit(run)
    wait_for(lambda: len(trained(run)) >= 1)
    look = marked(run)
    assert stop_run(run, "asked by a test")
    if supervised:
        thread.join()
        assert len(seen) == 1
    assert look() == [] and local_client.guardian(run) is None
    assert fold(read(run.journal)).state == "cancelled"
    assert not stop_run(run, "again")
    assert not supervise.stop_file(run).exists()


@pytest.mark.slow
@pytest.mark.parametrize(("stop_wait_s", "ends_well"), [(4.0, False), (60.0, True)])
def test_a_job_has_the_configured_time_to_save(
    make_run: MakeRun, stop_wait_s: float, ends_well: bool
) -> None:
    run = make_run({"steps": 60, "seconds": 1.0, "save_seconds": 22}, stop_wait_s=stop_wait_s)
    submit(run)
    wait_for(lambda: len(trained(run)) >= 1)
    look = marked(run)
    started = time.monotonic()
    assert stop_run(run, "asked by a test")
    assert (run.attempt_dir(1) / "exit.json").exists() == ends_well
    assert time.monotonic() - started < 60  # it is not waited for longer than it takes
    assert look() == []


@pytest.mark.slow
def test_a_guardian_that_nobody_needs_ends(make_run: MakeRun) -> None:
    run = make_run({"steps": 1, "seconds": 0.1})
    from miles_core.cluster.local_secrets import ensure_secrets

    ensure_secrets(run, own_agent_server=False)
    child = subprocess.Popen(
        [sys.executable, "-m", "miles_core.cluster.local", run.path, "--linger", "1"]
    )
    wait_for(lambda: local_client.guardian(run) is not None)
    look = marked(run)
    assert child.wait(90) == 0
    assert look() == []


@pytest.fixture(autouse=True)
def _standin_on_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    yield
