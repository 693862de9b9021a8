"""What `miles tasks check` prints: a table, the reasons, and the same as one JSON object."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from miles_cli.live import duration
from miles_cli.tables import print_table

if TYPE_CHECKING:
    from pathlib import Path

    from miles_core.admission.report import TaskReport

_COLUMNS = (
    "task",
    "state",
    "oracle",
    "nop",
    "forged",
    "hidden",
    "seconds",
    "MB disk/mem",
    "reason",
)
_NAMES_SHOWN = 10


def plain(text: str) -> str:
    """A text in one line of printable characters; others are written as in Python's strings."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text
    )


def as_json(
    tasks_dir: Path,
    sandbox: str,
    reports: list[TaskReport],
    skipped: dict[str, list[str]],
    seconds: float,
) -> dict[str, Any]:
    """The object that `--json` prints; it says what the table says.

    `skipped` has the names of what is no task in the folder, by why it is none. A byte of a name
    that is no text is `\\udcXX`, as in Python.
    """
    from miles_core.admission.report import CHECKS_VERSION, State

    states = Counter(report.state for report in reports)
    return {
        "tasks_dir": str(tasks_dir),
        "sandbox": sandbox,
        "checks_version": CHECKS_VERSION,
        "admitted": states[State.ADMITTED] == len(reports),
        "states": {state.value: states[state] for state in State},
        "seconds": round(seconds, 3),
        "skipped": {why: [plain(name) for name in names] for why, names in skipped.items()},
        "tasks": [{**report.to_json(), "task": plain(report.task)} for report in reports],
    }


def print_report(reports: list[TaskReport], skipped: dict[str, list[str]], seconds: float) -> None:
    """The table, every reason with what to do, what was skipped, and a summary."""
    print_table(_COLUMNS, [list(map(plain, _row(report))) for report in reports])
    _print_reasons(reports)
    for line in skipped_lines(skipped):
        print(line)
    print(_summary(reports, seconds))


def skipped_lines(skipped: dict[str, list[str]]) -> list[str]:
    """How much in the folder is no task, which, and why."""
    lines = []
    for why, names in skipped.items():
        shown = ", ".join(plain(name) for name in names[:_NAMES_SHOWN])
        more = f" and {len(names) - _NAMES_SHOWN} more" if names[_NAMES_SHOWN:] else ""
        lines.append(f"no task, {why}: {len(names)} ({shown}{more})")
    return lines


def _row(report: TaskReport) -> list[str]:
    def outcome(trial: Any) -> str:
        if trial is None:
            return "-"
        return f"{trial.reward:g}" if trial.reward is not None else str(trial.cause)

    def choice(value: bool | None, yes: str, no: str) -> str:
        return "-" if value is None else yes if value else no

    def megabytes(value: int | None) -> str:
        return "-" if value is None else f"{value / 1e6:.0f}"

    return [
        report.task,
        report.state + (" (cached)" if report.cached else ""),
        outcome(report.oracle),
        outcome(report.nop),
        choice(report.forged_reward_survives, "taken", "refused"),
        choice(report.solution_hidden, "yes", "no"),
        f"{report.seconds:.1f}",
        f"{megabytes(report.disk_bytes)}/{megabytes(report.memory_peak_bytes)}",
        report.reason,
    ]


def _print_reasons(reports: list[TaskReport]) -> None:
    """Every reason in full, with what to do about it, and notes."""
    print()
    for report in reports:
        fixes = zip(report.reasons, report.fixes, strict=True)
        lines = [f"  {plain(reason)}\n    -> {plain(fix)}" for reason, fix in fixes]
        lines += [f"  note: {plain(note)}" for note in report.notes]
        if lines:
            print("\n".join([f"{plain(report.task)}: {report.state}", *lines]))


def _summary(reports: list[TaskReport], seconds: float) -> str:
    states = Counter(report.state.value for report in reports)
    told = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    cached = sum(report.cached for report in reports)
    noun = "task" if len(reports) == 1 else "tasks"
    text = f"{len(reports)} {noun} in {duration(seconds)}: {told}"
    return f"{text} ({cached} from the cache)" if cached else text
