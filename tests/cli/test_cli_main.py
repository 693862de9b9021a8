"""The command line: exit statuses, help, mistakes, status and progress output."""

import argparse
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from miles_cli.live import LiveProgress, duration, sparkline, summary
from miles_cli.main import COMMANDS, build_parser, main
from miles_core.config.schema import MilesConfig
from miles_core.runs.directory import RunDir
from miles_core.runs.journal import Journal


def with_subcommands(command: str) -> list[list[str]]:
    subcommands = build_parser(command).commands()[command].commands()
    return [[command], *([command, sub] for sub in subcommands)]


@pytest.fixture
def run(tmp_path: Path, small_config: MilesConfig) -> RunDir:
    return RunDir.create(tmp_path / "runs" / "one", small_config, {})


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_a_line_for_each_flag(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words in with_subcommands(command):
        with pytest.raises(SystemExit) as ended:
            main([*words, "--help"])
        assert ended.value.code == 0
        shown = capsys.readouterr().out
        for action in build_parser(command).leaf(words)._actions:
            if isinstance(action, argparse._SubParsersAction):
                continue
            assert action.help, f"{words}: {action.dest} has no help"
            assert all(flag in shown for flag in action.option_strings)


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_flag_is_a_usage_error(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words in with_subcommands(command):
        assert main([*words, "--no-such-flag-at-all"]) == 2
        shown = capsys.readouterr()
        assert shown.err.startswith("miles: ")
        assert "--help" in shown.err
        assert "Traceback" not in shown.err


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (["staus", "x"], "Did you mean status?"),
        (["status", "x", "--jsn"], "Did you mean --json?"),
        (["data", "conver"], "Did you mean convert?"),
        (["--vresion"], "See `miles --help`"),
    ],
)
def test_mistakes_name_the_nearest(
    argv: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    assert hint in capsys.readouterr().err


def test_overview_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n  {command} " in shown for command in COMMANDS)
    assert main([]) == 2


def test_status_json_has_the_promised_fields(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    with Journal(run.journal) as journal:
        journal.append("run_started", attempt=1, from_step=0, steps_total=3)
        journal.append("step_trained", step=0, metrics={"reward_mean": 0.5})
        journal.append("run_ended", state="failed", detail="why")
    runs_dir = str(run.path.parent)
    assert main(["status", "one", "--runs-dir", runs_dir, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    promised = {"state", "steps_done", "steps_total", "reward_mean", "verdicts", "weight_version"}
    promised |= {"last_event_age_s", "eta_s", "alarms"}
    assert promised <= shown.keys()
    assert (shown["state"], shown["steps_done"], shown["reward_mean"]) == ("failed", 1, [0.5])
    assert main(["status", str(run.path), "--watch"]) == 0
    text = capsys.readouterr().out
    assert "failed (why)" in text
    assert "1 of 3" in text


def test_status_of_no_run_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", "absent", "--runs-dir", str(tmp_path)]) == 2
    assert "make quickstart" in capsys.readouterr().err


def test_status_imports_nothing_heavy(run: RunDir) -> None:
    code = (
        "import sys; from miles_cli.main import main; "
        f"status = main(['status', {str(run.path)!r}]); "
        "heavy = {'torch', 'ray', 'prefect', 'pydantic', 'rich', 'pyarrow'} & set(sys.modules); "
        "print(heavy, file=sys.stderr); sys.exit(status or bool(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_reader_that_leaves_gets_no_traceback(run: RunDir) -> None:
    miles = Path(sys.executable).with_name("miles")
    writer = subprocess.Popen(
        [miles, "status", run.path], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert writer.stdout is not None
    assert writer.stderr is not None
    writer.stdout.close()
    stderr = writer.stderr.read()
    writer.stderr.close()
    assert writer.wait() == 1
    assert stderr == b""


def test_live_progress_prints_what_happens_in_the_block_only(run: RunDir) -> None:
    out = io.StringIO()
    with Journal(run.journal) as journal:
        journal.append("run_started", attempt=1, from_step=0, steps_total=2)
        journal.append("step_trained", step=0, metrics={"reward_mean": 0.25})
        with LiveProgress(run, out):
            journal.append("stage", name="rollout", state="started", step=1)
            journal.append("alarm", kind="no_signal", detail="all rewards are equal")
            journal.append("step_trained", step=1, metrics={"reward_mean": 0.75})
            journal.append("run_ended", state="completed", detail="")
    lines = [line.split("] ", 1)[1] for line in out.getvalue().splitlines()]
    assert lines == [
        "step 1: rollout ...",
        "ALARM no_signal: all rewards are equal",
        "step 1 trained (2/2): mean reward 0.750",
        "run completed",
    ]


def test_live_progress_draws_on_a_terminal(run: RunDir) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    with Journal(run.journal) as journal, LiveProgress(run, out):
        journal.append("run_started", attempt=1, from_step=0, steps_total=2)
        journal.append("trial_started", step=0, group_id="g", trial_id="t")
        journal.append("step_trained", step=0, metrics={"reward_mean": 0.25})
    shown = out.getvalue()
    assert "1/2" in shown
    assert "1 running" in shown
    assert "0.250" in shown


def test_live_progress_tells_a_damaged_journal_and_lets_the_work_go_on(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    with LiveProgress(run, io.StringIO()):
        run.journal.write_bytes(b"damaged\n")
        worked = True
    assert worked
    assert "ended early" in capsys.readouterr().err


def test_summary_ends_with_the_path(run: RunDir) -> None:
    with Journal(run.journal) as journal:
        journal.append("run_started", attempt=1, from_step=0, steps_total=1)
        journal.append("stage", name="train", state="ended", step=0, seconds=2.5)
        journal.append("step_trained", step=0, metrics={"reward_mean": 0.25})
        journal.append("run_ended", state="completed", detail="")
    lines = summary(run).splitlines()
    assert lines[-1] == str(run.path)
    assert "   0  0.2500" in lines
    assert "train             2.5" in lines


def test_small_formats() -> None:
    assert [duration(s) for s in (3.2, 185, 7800)] == ["3 s", "3 min 05 s", "2 h 10 min"]
    assert sparkline([0.0, None, 1.0]) == "▁·█"
    assert sparkline([]) == ""
