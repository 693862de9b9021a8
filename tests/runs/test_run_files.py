"""Atomic writes, line files and fingerprints."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from miles_core.runs.files import (
    LineFile,
    complete_lines,
    dumps,
    fingerprint,
    read_json,
    write_atomic,
    write_json,
)

WRITER = """
import sys
from miles_core.runs.files import write_atomic
n = 0
while True:
    n += 1
    write_atomic(sys.argv[1], bytes([n % 256]) * 300_000)
"""


def test_write_atomic_under_sigkill(tmp_path: Path) -> None:
    target = tmp_path / "state.bin"
    seen = set()
    for _ in range(5):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(target)])
        deadline = time.monotonic() + 30
        while not target.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        content = target.read_bytes()
        assert len(content) == 300_000
        assert len(set(content)) == 1
        seen.add(content[0])
    assert seen


def test_write_atomic_failure_leaves_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "a.json"
    write_json(target, {"a": 1})

    def fail(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        write_atomic(target, b"new")
    assert read_json(target) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_dumps_turns_nonfinite_numbers_into_null() -> None:
    assert dumps({"a": float("nan"), "b": Path("/x")}) == b'{"a":null,"b":"/x"}'


def test_fingerprint_of_objects_and_paths(tmp_path: Path) -> None:
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})
    assert fingerprint({"a": 1}) != fingerprint({"a": 2})
    folder = tmp_path / "one"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "f").write_text("x")
    first = fingerprint(folder)
    folder.rename(tmp_path / "two")
    assert fingerprint(tmp_path / "two") == first
    os.utime(tmp_path / "two" / "sub" / "f", (1, 1))
    assert fingerprint(tmp_path / "two") == first
    (tmp_path / "two" / "sub" / "f").rename(tmp_path / "two" / "sub" / "g")
    assert fingerprint(tmp_path / "two") != first
    file = tmp_path / "data"
    file.write_text("x")
    assert fingerprint(file) != fingerprint(str(file))
    with pytest.raises(FileNotFoundError):
        fingerprint(tmp_path / "absent")


def test_a_fingerprint_reads_nothing_that_has_no_end(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "f").write_text("x")
    found = {fingerprint(folder)}
    os.mkfifo(folder / "pipe")
    found.add(fingerprint(folder))
    links = {"zero": "/dev/zero", "kmsg": "/proc/kmsg", "root": "/", "proc": "/proc"}
    links |= {"up": "..", "self": ".", "nowhere": "/nowhere", "loop": "loop"}
    for name, target in links.items():
        (folder / "sub" / name).symlink_to(target)
        found.add(fingerprint(folder))
    assert len(found) == 2 + len(links)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "g").write_text("1")
    (folder / "outside").symlink_to(outside)
    (outside / "back").symlink_to(folder)
    first = fingerprint(folder)
    (outside / "g").write_text("2")
    assert fingerprint(folder) != first
    with pytest.raises(ValueError, match="is a pipe"):
        fingerprint(folder / "pipe")


@pytest.mark.parametrize("size", [1, 65_535, 65_536, 200_000])
def test_line_file_finds_its_last_line_and_cuts_a_torn_one(tmp_path: Path, size: int) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"first\n" + b"x" * size + b"\ntorn")
    lasts = []
    file = LineFile(path)

    def line(last: bytes) -> bytes:
        lasts.append(last)
        return b"next"

    file.append(line)
    file.close()
    assert lasts == [b"x" * size]
    assert [raw for raw, _ in complete_lines(path)] == [b"first", b"x" * size, b"next"]
