"""The tracer follows a process to its end however its threads come and go."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from syscall_tracer import SUPPORTED, Point, Tracer

pytestmark = pytest.mark.skipif(not SUPPORTED, reason="ptrace as Linux on x86-64 has it")

THREADS, FILES = 12, 6


def _write_files(root: Path, thread: int) -> None:
    for number in range(FILES):
        (root / f"file{thread}").write_text(str(number))


def _until_the_exit(root: Path) -> None:
    """Threads that still write when their process ends."""
    for thread in range(THREADS):
        threading.Thread(
            target=lambda n=thread: [_write_files(root, n) for _ in iter(int, 1)], daemon=True
        ).start()
    while not all((root / f"file{thread}").exists() for thread in range(THREADS)):
        pass


def _one_after_another(root: Path) -> None:
    """Threads that end while others begin."""
    for first in range(0, THREADS, 4):
        threads = [
            threading.Thread(target=_write_files, args=(root, n)) for n in range(first, first + 4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _trace(work: Callable[[Path], None], root: Path, point: Point | None) -> tuple[int, Tracer]:
    ready, tell = os.pipe()
    wait, go = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(tell, b"x")
            os.read(wait, 1)
            work(root)
        finally:
            os._exit(3)
    assert os.read(ready, 1)
    tracer = Tracer(pid, root, point)
    tracer.attach()
    os.write(go, b"x")
    for end in (ready, tell, wait, go):
        os.close(end)
    return os.waitstatus_to_exitcode(tracer.follow()), tracer


@pytest.mark.parametrize("round_", range(5))
@pytest.mark.parametrize("work", [_until_the_exit, _one_after_another])
def test_a_process_is_followed_to_its_end(
    tmp_path: Path, work: Callable[[Path], None], round_: int
) -> None:
    status, tracer = _trace(work, tmp_path, None)
    assert status == 3 and not tracer.killed
    assert {f"open file{n}" for n in range(THREADS)} <= set(tracer.events)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("work", [_until_the_exit, _one_after_another])
def test_a_process_is_killed_among_its_threads(
    tmp_path: Path, work: Callable[[Path], None], after: bool
) -> None:
    status, tracer = _trace(work, tmp_path, Point("write file1", 0, after))
    assert status == -9 and tracer.killed
    assert (tmp_path / "file1").read_text() == ("0" if after else "")
