"""`miles data convert` as a person calls it, and its benchmark."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def miles(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "miles_cli.main", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text('{"task": {"id": "s::a", "text": "do a"}}\n{"task": {"id": "s::b"}}\n')
    return path


def test_convert_fails_whole_or_skips(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    words = ["data", "convert", "--input", str(source), "--output", str(out)]
    words += ["--prompt-key", "task.text", "--id-key", "task.id"]
    failed = miles(*words)
    assert failed.returncode == 2
    assert "in.jsonl:2: has nothing at 'task.text'" in failed.stderr
    assert "task.id" in failed.stderr and "--on-bad-row skip" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert not out.exists()
    done = miles(*words, "--on-bad-row", "skip", "--agent-name", "oracle", "--json")
    assert done.returncode == 0
    report = json.loads(done.stdout)
    assert (report["rows"], report["bad"], report["mapped_ids"]) == (1, 1, 1)
    row = json.loads(out.read_text())
    assert row["metadata"]["instance_id"] == "a"
    assert row["metadata"]["agent_name"] == "oracle"


def test_the_input_is_never_replaced(tmp_path: Path) -> None:
    rows = tmp_path / "in.jsonl"
    rows.write_text('{"id": "a", "prompt": "p"}\n')
    (tmp_path / "link.jsonl").symlink_to(rows)
    for output in (rows, tmp_path / "link.jsonl"):
        wrong = miles("data", "convert", "--input", str(rows), "--output", str(output))
        assert wrong.returncode == 2
        assert "is the input itself" in wrong.stderr
    assert rows.read_text() == '{"id": "a", "prompt": "p"}\n'


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    rows = tmp_path / "in.jsonl"
    rows.write_text('{"id": "a", "prompt": "p"}\n')
    for output in ("/proc/rows.jsonl", f"{rows}/rows.jsonl"):
        wrong = miles("data", "convert", "--input", str(rows), "--output", output)
        assert wrong.returncode == 2
        assert "Traceback" not in wrong.stderr
        assert wrong.stderr.startswith("miles: /")


def holding(rows: Path, output: Path) -> tuple[subprocess.Popen[str], int]:
    """A conversion that waits in the middle for rows that its output (a pipe) is to hold."""
    os.mkfifo(output)
    command = [sys.executable, "-m", "miles_cli.main", "data", "convert", "--append"]
    command += ["--input", str(rows), "--output", str(output)]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    return first, os.open(output, os.O_WRONLY)  # opens when the other side reads


def test_two_conversions_of_one_output(tmp_path: Path) -> None:
    rows, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows.write_text('{"id": "a", "prompt": "p"}\n')
    second = ["data", "convert", "--input", str(rows), "--output", str(output)]
    first, pipe = holding(rows, output)
    for words in (second, [*second, "--append"]):
        refused = miles(*words)
        assert refused.returncode == 2
        assert f"{output}: another conversion is writing this file" in refused.stderr
        assert "wait until it has ended" in refused.stderr
    os.write(pipe, b'{"prompt": "q", "metadata": {"instance_id": "kept"}}\n')
    os.close(pipe)
    assert "1 rows were there before and kept" in first.communicate()[0]
    assert first.returncode == 0
    done = miles(*second, "--append", "--json")
    assert json.loads(done.stdout)["kept_rows"] == 2
    ids = [json.loads(x)["metadata"]["instance_id"] for x in output.read_text().splitlines()]
    assert ids == ["kept", "a", "a"]
    assert sorted(os.listdir(tmp_path)) == ["in.jsonl", "out.jsonl"]


def test_a_killed_conversion_locks_no_one_out(tmp_path: Path) -> None:
    rows, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows.write_text('{"id": "a", "prompt": "p"}\n')
    first, pipe = holding(rows, output)
    first.kill()
    first.communicate()
    os.close(pipe)
    output.unlink()
    done = miles("data", "convert", "--input", str(rows), "--output", str(output), "--append")
    assert done.returncode == 0, done.stderr
    assert len(output.read_text().splitlines()) == 1
    assert not (tmp_path / ".out.jsonl.lock").exists()


def test_unknown_dataset_fails_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nothing listens on this port
    wrong = miles("data", "convert", "--input", "data/missing", "--output", f"{tmp_path}/o.jsonl")
    assert wrong.returncode == 2
    assert "data/missing: not a file or folder" in wrong.stderr
    assert "Retrying" not in wrong.stderr


def test_help_and_unknown_flag() -> None:
    text = miles("data", "convert", "--help").stdout
    for flag in ("input", "output", "agent-name", "prompt-key", "id-key", "split", "limit"):
        assert f"--{flag} " in text
    assert "--append" in text and "--on-bad-row" in text
    wrong = miles("data", "convert", "--promt-key", "x", "--input", "a", "--output", "b")
    assert wrong.returncode == 2
    assert "Did you mean --prompt-key?" in wrong.stderr


@pytest.mark.parametrize("given", [False, True])
def test_benchmark_compares_the_same_rows(tmp_path: Path, given: bool) -> None:
    command = [sys.executable, "benchmarks/data.py", "--mb", "1", "--repeats", "2", "--json"]
    if given:
        rows = tmp_path / "rows.jsonl"
        rows.write_text(
            '{"a": {"b": [1, "é", null]}, "split": "dev"}\n{"problem_statement": "p"}\n'
        )
        command += ["--input", str(rows)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    result = json.loads(done.stdout)
    assert result["same_rows"] is True
    assert result["rows"] > 50
    assert 0 < result["ratio_min"] <= result["ratio"] <= result["ratio_max"]
    assert {"mb_per_s", "peak_rss_mb"} <= set(result["ours"]) & set(result["plain"])
