"""The journal: numbering, torn lines, several writers, damage."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from miles_core.runs.journal import Journal, JournalError, Tail, read
from miles_core.runs.metrics import append_metrics, read_metrics

APPENDER = """
import sys
from miles_core.runs.journal import Journal
journal = Journal(sys.argv[1])
for n in range(int(sys.argv[2])):
    journal.append("alarm", kind="test", detail=str(n))
"""


def test_sequence_goes_on_and_a_torn_line_is_ignored_then_cut(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal(path) as journal:
        assert journal.append("alarm", kind="a", detail="")["seq"] == 1
        assert journal.append("alarm", kind="b", detail="")["seq"] == 2
    with open(path, "ab") as file:
        file.write(b'{"seq":3,"time":1.0,"event":"al')
    assert [e["seq"] for e in read(path)] == [1, 2]
    with Journal(path) as journal:
        assert journal.append("alarm", kind="c", detail="")["seq"] == 3
    assert [e["kind"] for e in read(path)] == ["a", "b", "c"]


def test_threads_and_processes_do_not_mix_lines(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    others = [subprocess.Popen([sys.executable, "-c", APPENDER, str(path), "40"]) for _ in range(2)]
    with Journal(path) as journal:

        def work() -> None:
            for n in range(25):
                journal.append("alarm", kind="thread", detail=str(n))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [other.wait() for other in others] == [0, 0]
    assert [e["seq"] for e in read(path)] == list(range(1, 181))


def test_a_killed_writer_loses_no_acknowledged_event(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    writer = subprocess.Popen([sys.executable, "-c", APPENDER, str(path), "1000000"])
    deadline = time.monotonic() + 30
    while len(read(path)) < 20 and time.monotonic() < deadline:
        time.sleep(0.02)
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    before = len(read(path))
    assert before >= 20
    with Journal(path) as journal:
        assert journal.append("alarm", kind="after", detail="")["seq"] == before + 1
    assert [e["seq"] for e in read(path)] == list(range(1, before + 2))


def test_damage_in_the_middle_is_told(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'{"seq":1,"time":1,"event":"alarm"}\nnot json\n{"seq":3}\n')
    with pytest.raises(JournalError, match="line 2"):
        read(path)


def test_unknown_events_and_reserved_fields_are_refused(tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal:
        with pytest.raises(ValueError, match="unknown journal event"):
            journal.append("trial_finished")
        with pytest.raises(ValueError, match="seq"):
            journal.append("alarm", seq=9)
    assert read(tmp_path / "j") == []


def test_a_failed_append_leaves_no_half_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Journal(tmp_path / "j") as journal:
        journal.append("alarm", kind="a", detail="")
        with monkeypatch.context() as patch:

            def fail(_fd: int) -> None:
                raise OSError("no space left")

            patch.setattr(os, "fsync", fail)
            with pytest.raises(OSError, match="no space"):
                journal.append("alarm", kind="lost", detail="")
        assert journal.append("alarm", kind="b", detail="")["seq"] == 2
    assert [e["kind"] for e in read(tmp_path / "j")] == ["a", "b"]


def test_tail_returns_only_what_is_new(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "j")
    assert tail.new() == []
    with Journal(tmp_path / "j") as journal:
        journal.append("alarm", kind="a", detail="")
        assert [e["kind"] for e in tail.new()] == ["a"]
        journal.append("alarm", kind="b", detail="")
        assert [e["kind"] for e in tail.new()] == ["b"]
    assert tail.new() == []


def test_metrics_keep_the_last_of_a_step_done_twice(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append_metrics(path, 1, "train", {"loss": 1.0})
    append_metrics(path, 0, "train", {"loss": 2.0})
    append_metrics(path, 1, "rollout", {"reward": 0.5})
    append_metrics(path, 1, "train", {"loss": 3.0})
    with open(path, "ab") as file:
        file.write(b'{"step": 2, "sou')
    rows = read_metrics(path)
    assert [(r["step"], r["source"]) for r in rows] == [(0, "train"), (1, "rollout"), (1, "train")]
    assert rows[2]["loss"] == 3.0
    with pytest.raises(ValueError, match="step"):
        append_metrics(path, 1, "train", {"step": 4})
