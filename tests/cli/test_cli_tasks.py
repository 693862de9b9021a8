"""`miles tasks check`: mistakes, one task, progress in words, what is known already."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest

from miles_cli.main import main
from miles_cli.tasks import _Line, progress_text
from miles_core.admission.cache import CheckCache
from miles_core.admission.check import Progress
from miles_core.admission.digest import task_digest
from miles_core.admission.report import State, TaskReport


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("write-001", "write-002"):
        task = tmp_path / "tasks" / name
        (task / "tests").mkdir(parents=True)
        (task / "task.toml").write_text(f'schema_version = "1.4"\n# {name}\n')
    return tmp_path / "tasks"


@pytest.fixture
def cache(folder: Path, tmp_path: Path) -> Path:
    path = tmp_path / "checks.json"
    kept = CheckCache(path, "bubblewrap")
    for name, state in (("write-001", State.ADMITTED), ("write-002", State.FAILED)):
        digest = task_digest(folder / name)
        reasons = [] if state is State.ADMITTED else ["the solution gets 0, not 1"]
        fixes = ["correct it"] * len(reasons)
        kept.put(TaskReport(task=name, state=state, reasons=reasons, fixes=fixes, digest=digest))
    kept.save()
    return path


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["absent"], "is not a folder"),
        (["{tasks}", "write-0001"], "Did you mean write-001?"),
        (["{tasks}/write-001", "write-001"], "Leave the ids out"),
        (["{tasks}/.."], "holds no task"),
        (["{tasks}", "--agent-server-url", "http://127.0.0.1:1"], "no agent server answers"),
        (["{tasks}", "--max-concurrent", "0"], "must be a whole number"),
        (["{tasks}", "--agent-python", "/absent"], "no Python of the agent-server environment"),
        (["{tasks}", "--agent-server-url", "http://h:1", "--images", "podman"], "--images is for"),
        (["{tasks}", "--agent-server-url", "http://h:1", "--trials-dir", "t"], "--trials-dir is"),
        (["{tasks}", "--images", "docker"], "invalid choice: 'docker'"),
    ],
)
def test_mistakes_say_what_to_do(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    argv = [word.replace("{tasks}", str(folder)) for word in words]
    assert main(["tasks", "check", *argv, "--cache", str(tmp_path / "none.json")]) == 2
    assert message in capsys.readouterr().err


def test_the_exit_status_is_0_only_when_all_are_admitted(
    folder: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--cache", str(cache)]
    assert main(["tasks", "check", str(folder / "write-001"), *flags]) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[-1].startswith("1 task in ")
    assert shown.endswith(": 1 admitted (1 from the cache)\n")
    assert main(["tasks", "check", str(folder), *flags]) == 1
    assert "the solution gets 0, not 1" in capsys.readouterr().out


def test_a_folder_with_an_odd_name_is_no_task_whatever_it_holds(
    folder: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "write-001").rename(folder / "write 001")
    flags = ["--cache", str(cache), "--agent-python", "/absent"]
    assert main(["tasks", "check", str(folder), *flags]) == 1
    assert "write 001: failed\n  the folder's name is no task id" in capsys.readouterr().out


def test_names_of_any_kind_stay_in_their_line(
    folder: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["new\nline", "\x1b[31mred", "no-text-\udcff", "-dash", "a" * 201]
    for name in names:
        shutil.copytree(folder / "write-001", folder / name)
    flags = ["--cache", str(cache), "--agent-python", "/absent"]
    assert main(["tasks", "check", str(folder), *flags]) == 1
    table = capsys.readouterr().out.split("\n\n")[0].splitlines()
    shown = [line.split()[0] for line in table[1:]]
    escaped = ["\\x1b[31mred", "-dash", "a" * 201, "new\\nline", "no-text-\\udcff"]
    assert sorted(shown) == sorted([*escaped, "write-001", "write-002"])
    reasons = dict(zip(shown, table[1:], strict=True))
    assert "it begins with '-'" in reasons["-dash"]
    assert "it has '\\n'" in reasons["new\\nline"]
    assert "it has 201 characters" in reasons["a" * 201]
    assert main(["tasks", "check", str(folder), "--json", *flags]) == 1
    tasks = {task["task"]: task for task in json.loads(capsys.readouterr().out)["tasks"]}
    assert sorted(tasks) == sorted(shown)
    assert all(
        task["reasons"][0] in reasons[name] for name, task in tasks.items() if task["reasons"]
    )


def test_what_is_no_task_is_told_with_the_reason(
    folder: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--cache", str(cache)]
    for number in range(12):
        (folder / f"row\t{number:02}").touch()
    (folder / "empty").mkdir()
    (folder / "lost").symlink_to("nowhere")
    assert main(["tasks", "check", str(folder), *flags]) == 1
    shown = capsys.readouterr().out
    assert "no task, a file: 12 (row\\t00, row\\t01, " in shown and "row\\t09 and 2 more)" in shown
    assert "no task, an empty folder: 1 (empty)" in shown
    assert "no task, a link that leads nowhere: 1 (lost)" in shown
    assert main(["tasks", "check", str(folder), "--json", *flags]) == 1
    skipped = json.loads(capsys.readouterr().out)["skipped"]
    assert {why: len(names) for why, names in skipped.items()} == {
        "a file": 12,
        "an empty folder": 1,
        "a link that leads nowhere": 1,
    }
    assert main(["tasks", "check", str(folder), "write-001", *flags]) == 0
    assert "no task" not in capsys.readouterr().out  # what was not asked for


def test_a_folder_without_a_task_says_what_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "rows.jsonl").touch()
    assert main(["tasks", "check", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert "holds no task\nno task, an empty folder: 1 (notes)\nno task, a file: 1 (rows" in told
    assert "A task is a directory with task.toml, instruction.md, environment/ and tests/" in told


def test_what_another_builder_of_images_said_is_not_taken(
    folder: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--cache", str(cache), "--agent-python", "/absent"]
    assert main(["tasks", "check", str(folder), *flags]) == 1
    assert main(["tasks", "check", str(folder), "--images", "buildah", *flags]) == 2
    assert "no Python" in capsys.readouterr().err


def test_json_is_one_object(folder: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks", "check", str(folder), "--json", "--cache", str(cache)]) == 1
    shown = json.loads(capsys.readouterr().out)
    assert shown["admitted"] is False
    assert shown["sandbox"] == "bubblewrap"
    assert (shown["states"]["admitted"], shown["states"]["failed"]) == (1, 1)
    assert [task["task"] for task in shown["tasks"]] == ["write-001", "write-002"]
    assert all(task["cached"] for task in shown["tasks"])


def test_progress_tells_how_far_it_is_and_when_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    progress = Progress(total=12, began=0.0)
    monkeypatch.setattr("miles_core.admission.check.time.monotonic", lambda: 30.0)
    assert progress_text(progress) == "0 of 12 tasks checked"
    progress.done, progress.cached = 4, 2
    progress.states.update([State.ADMITTED] * 3 + [State.FAILED])
    # Two tasks took 30 s, and eight are left.
    assert progress_text(progress) == (
        "4 of 12 tasks checked, 1 not admitted, about 2 min 00 s left"
    )
    progress.done = 12
    assert "left" not in progress_text(progress)


def test_the_line_is_redrawn_on_a_terminal_and_leaves_no_trace() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    with _Line(stream) as line:
        line.show(Progress(total=2))
        line.show(Progress(total=2, done=1))
    assert "1 of 2 tasks checked" in stream.getvalue()
    assert stream.getvalue().endswith("\r\x1b[K")
