"""How a process ended is told by the kernel, whoever its parent is."""

import signal
import subprocess
import sys

import pytest

from miles_core.cluster.process_end import ProcessEnd, describe

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


def test_a_process_that_does_not_end_is_made_to() -> None:
    process = subprocess.Popen(SLEEP)
    end = ProcessEnd(process.pid)
    process.send_signal(signal.SIGSTOP)
    assert end.status() is None
    assert end.kill(within_s=0.1)
    assert process.wait(10) == -signal.SIGKILL
    end.close()


def test_the_status_is_known_after_the_process_is_gone() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input(); exit(7)"], stdin=subprocess.PIPE)
    end = ProcessEnd(process.pid)
    process.communicate(b"\n", timeout=30)
    status = end.status()
    end.close()
    if status is None:
        pytest.skip("this kernel does not tell")
    assert describe(status) == "ended with exit status 7"


def test_endings_in_words() -> None:
    assert describe(-signal.SIGSEGV) == "was ended by SIGSEGV"
    assert describe(-999) == "was ended by signal 999"
    assert describe(None) == "has ended"
