"""Processes by identity, descendants, and ending them."""

import os
import signal
import subprocess
import sys
import time

from miles_core.cluster import local_process as procs

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]
PARENT = (
    "import subprocess, sys, time\n"
    "from miles_core.cluster.local_process import die_with_parent\n"
    f"c = subprocess.Popen({SLEEP!r}, preexec_fn=die_with_parent() if sys.argv[1] == 'bound' "
    "else None, start_new_session=True)\n"
    "print(c.pid, flush=True)\n"
    "time.sleep(60)\n"
)


def family(mode: str) -> tuple["subprocess.Popen[str]", procs.Process]:
    """A process with a child in a session of its own; the child's identity."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, mode], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child = procs.process(int(parent.stdout.readline()))
    parent.stdout.close()
    assert child is not None
    return parent, child


def test_another_start_time_is_another_process() -> None:
    me = procs.this_process()
    assert me.alive
    assert not procs.Process(me.pid, me.started + 1).alive


def test_no_signal_reaches_a_process_with_a_recycled_id() -> None:
    child = subprocess.Popen(SLEEP)
    found = procs.process(child.pid)
    assert found is not None
    procs.Process(child.pid, found.started + 1).send(signal.SIGKILL)
    time.sleep(0.2)
    assert child.poll() is None
    child.kill()
    child.wait()
    found.send(signal.SIGTERM)  # gone: nothing happens


def test_a_zombie_is_not_alive() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    found = procs.process(child.pid)
    assert found is not None
    assert procs.wait_gone([found], 20.0)
    child.wait()


def test_descendants_are_found_and_ended_whatever_their_session() -> None:
    parent, child = family("free")
    below = procs.descendants(os.getpid())
    assert child in below and child in procs.descendants(parent.pid)
    root = procs.process(parent.pid)
    assert root is not None
    procs.end([root, child], grace_s=5.0)
    assert not child.alive
    parent.wait()


def test_a_bound_child_dies_with_a_killed_parent_and_a_free_one_does_not() -> None:
    for mode, survives in (("bound", False), ("free", True)):
        parent, child = family(mode)
        parent.kill()
        parent.wait()
        gone = procs.wait_gone([child], 1.0 if survives else 20.0)
        assert gone is not survives
        child.send(signal.SIGKILL)


def test_processes_are_found_by_the_mark_in_their_environment() -> None:
    child = subprocess.Popen(SLEEP, env={**os.environ, "TEST_MARK_OF_MILES": "one-1"})
    try:
        deadline = time.monotonic() + 20
        while not procs.marked("TEST_MARK_OF_MILES", "one-1") and time.monotonic() < deadline:
            time.sleep(0.05)
        assert [p.pid for p in procs.marked("TEST_MARK_OF_MILES", "one-1")] == [child.pid]
        assert procs.marked("TEST_MARK_OF_MILES", "one") == []
    finally:
        child.kill()
        child.wait()


def test_what_ignores_sigterm_is_killed() -> None:
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); "
    child = subprocess.Popen(
        [sys.executable, "-c", code + "time.sleep(60)"], stdout=subprocess.PIPE
    )
    assert child.stdout is not None and child.stdout.readline()
    found = procs.process(child.pid)
    assert found is not None
    procs.end([found], grace_s=0.3)
    assert not found.alive
    assert child.wait() == -signal.SIGKILL
    child.stdout.close()
