"""The example tasks: generated, well formed, solvable, and not solved by doing nothing."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from miles_core.runs.files import fingerprint

EXAMPLES = Path(__file__).parents[2] / "examples"
TASKS = EXAMPLES / "tasks"
TASK_IDS = sorted(path.name for path in TASKS.iterdir())


def rows(split: str) -> list[dict]:
    return [json.loads(line) for line in (EXAMPLES / "rows" / f"{split}.jsonl").open()]


def ids(split: str) -> list[str]:
    return [row["metadata"]["instance_id"] for row in rows(split)]


def metadata(task_id: str) -> dict:
    return tomllib.loads((TASKS / task_id / "task.toml").read_text())["metadata"]


def test_committed_files_are_what_the_generator_writes(tmp_path):
    script = EXAMPLES / "generate_tasks.py"
    subprocess.run([sys.executable, script, "--output", tmp_path], check=True)
    for name in ("tasks", "rows"):
        assert fingerprint(tmp_path / name) == fingerprint(EXAMPLES / name), (
            f"examples/{name} differs from the output of examples/generate_tasks.py; run it again"
        )


def test_rows_name_every_task_once():
    assert len(ids("train")) >= 48 and len(ids("heldout")) >= 16
    assert sorted(ids("train") + ids("heldout")) == TASK_IDS
    assert len({metadata(task)["family"] for task in ids("train")}) >= 8


def test_rows_hold_the_instruction():
    for row in rows("train") + rows("heldout"):
        task = TASKS / row["metadata"]["instance_id"]
        assert row["prompt"] == (task / "instruction.md").read_text()


def test_heldout_names_are_not_in_training():
    names = {
        split: {name for task in ids(split) for name in metadata(task)["names"]}
        for split in ("train", "heldout")
    }
    assert names["heldout"] and not names["train"] & names["heldout"]


def app_of(task: Path, tmp_path: Path) -> Path:
    """What the Dockerfile leaves in /app: its COPY lines, checked to be all of `environment/`."""
    app = tmp_path / "app"
    app.mkdir(parents=True)
    lines = (task / "environment" / "Dockerfile").read_text().splitlines()
    assert lines[0].startswith("FROM debian") and lines[1] == "WORKDIR /app"
    for line in lines[2:]:
        word, source, target = line.split()
        assert word == "COPY"
        shutil.copy(task / "environment" / source, app / Path(target).relative_to("/app"))
    assert len(lines) - 1 == len(list((task / "environment").iterdir()))
    return app


def in_sandbox(command: str, app: Path, task: Path, logs: Path) -> None:
    system = [["--ro-bind-try", path, path] for path in ("/usr", "/bin", "/lib", "/lib64")]
    subprocess.run(
        ["bwrap", "--unshare-all", "--die-with-parent", *sum(system, [])]
        + ["--dev", "/dev", "--tmpfs", "/tmp", "--bind", str(app), "/app"]
        + ["--ro-bind", str(task), "/task", "--bind", str(logs), "/logs/verifier"]
        + ["--chdir", "/app", "/bin/sh", "-c", command],
        check=True,
        timeout=30,
    )


def reward_after(command: str, task: Path, tmp_path: Path) -> float:
    app, logs = app_of(task, tmp_path), tmp_path / "logs"
    logs.mkdir()
    in_sandbox(command, app, task, logs)
    in_sandbox("sh /task/tests/test.sh", app, task, logs)
    return float((logs / "reward.txt").read_text())


@pytest.mark.parametrize("task_id", TASK_IDS)
def test_solution_is_rewarded_and_nothing_is_not(task_id, tmp_path):
    task = TASKS / task_id
    assert reward_after("sh /task/solution/solve.sh", task, tmp_path / "oracle") == 1.0
    assert reward_after("true", task, tmp_path / "nop") == 0.0


@pytest.mark.parametrize(
    ("task_id", "wrong"),
    [
        ("write-001", "echo {0}x > {1}.txt"),
        ("write-001", "printf {0} > {1}.txt"),
        ("append-001", "echo {0} > {1}.txt"),
        ("folder-001", "touch {0}"),
        ("empty-001", "echo > {0}.txt"),
        ("copy-001", "mv {0}.txt {1}.txt"),
        ("rename-001", "cp {0}.txt {1}.txt"),
        ("count-001", "wc -l {0}.txt > {1}.txt"),
        ("sort-001", "cp {0}.txt {1}.txt"),
        ("first-001", "head -n 2 {0}.txt > {1}.txt"),
        ("remove-001", "rm *.txt"),
    ],
)
def test_almost_right_is_not_rewarded(task_id, wrong, tmp_path):
    command = wrong.format(*metadata(task_id)["names"])
    assert reward_after(command, TASKS / task_id, tmp_path) == 0.0


def test_removed_inputs_are_graded_zero(tmp_path):
    assert reward_after("rm -rf /app/*", TASKS / "sort-001", tmp_path) == 0.0
