"""One supervisor a run."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from miles_core.runs.lock import RunLocked, holder, run_lock

HOLD = """
import subprocess, sys, time
from miles_core.runs.lock import run_lock
with run_lock(sys.argv[1], what="the other one"):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"],
                             stdout=subprocess.DEVNULL)
    print(child.pid, flush=True)
    time.sleep(60)
"""


def test_a_second_supervisor_is_refused_until_the_first_is_killed(tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE)
    assert other.stdout is not None
    child = int(other.stdout.readline())
    try:
        held = holder(tmp_path)
        assert held is not None
        assert (held.pid, held.what) == (other.pid, "the other one")
        with pytest.raises(RunLocked, match="the other one") as caught, run_lock(tmp_path):
            pass
        assert caught.value.holder.pid == other.pid
        other.send_signal(signal.SIGKILL)
        other.wait()
        assert holder(tmp_path) is None  # though its child lives on
        with run_lock(tmp_path) as me:
            assert me.pid == os.getpid()
            assert holder(tmp_path) == me
        assert holder(tmp_path) is None
    finally:
        other.kill()
        other.wait()
        other.stdout.close()
        os.kill(child, signal.SIGKILL)


def test_nobody_holds_a_run_that_was_never_driven(tmp_path: Path) -> None:
    assert holder(tmp_path) is None
    assert holder(tmp_path / "absent") is None
