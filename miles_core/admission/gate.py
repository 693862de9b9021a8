"""May a run train on these tasks? Asked before anything is spent."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from miles_core.admission.cache import FILE_NAME, CheckCache
from miles_core.admission.check import Checker, Progress, cached_reports
from miles_core.admission.report import State, TaskReport
from miles_core.agent_server.client import AgentServerClient
from miles_core.errors import UserError

Mode = Literal["run", "require", "off"]

_SHOWN = 10

AGAIN = (
    "The sandbox or the agent server failed twice: try again, or see the agent server's log, "
    "RUN/cluster/agent_server.log. To train on any task: --task-check off."
)
WAYS = (
    "Correct these tasks or leave their rows out, and start a new run (--new, or another "
    "--run-name). To train on them as they are: --task-check off."
)


class TasksRefused(UserError):
    """A run would train on tasks that are not admitted; `reports` are theirs."""

    def __init__(self, reports: list[TaskReport], total: int) -> None:
        lines = [f"  {r.task}: {r.state}: {r.reason}" + _fix(r) for r in reports[:_SHOWN]]
        if len(reports) > _SHOWN:
            lines.append(f"  and {len(reports) - _SHOWN} more")
        message = f"{len(reports)} of the run's {total} tasks are not admitted to training:\n"
        failed_by_world = all(r.state is State.UNDECIDED and r.nop for r in reports)
        super().__init__(message + "\n".join(lines), AGAIN if failed_by_world else WAYS)
        self.reports = reports


def _fix(report: TaskReport) -> str:
    return f" ({report.fix})" if report.fix else ""


@dataclass
class Gate:
    """What a run asks: its tasks, where they are, and what is known of them.

    `tasks_dir` counts when it can be read here; it is the folder that the agent server has.
    """

    tasks_dir: Path
    names: set[str]
    cache_dir: Path
    sandbox: str
    mode: Mode
    unproven: list[str] = field(default_factory=list)
    """Tasks without a solution that were let through."""

    @property
    def _folder(self) -> Path | None:
        known = self.tasks_dir.is_dir() and all((self.tasks_dir / n).is_dir() for n in self.names)
        return self.tasks_dir if known else None

    def _cache(self) -> CheckCache:
        return CheckCache(self.cache_dir / FILE_NAME, self.sandbox)

    def check_cache(self) -> None:
        """Raise TasksRefused for what the cache alone says of the tasks; checks none."""
        if self.mode == "off":
            return
        folder = self._folder
        known = cached_reports(folder, self._cache(), self.names)
        if self.mode == "run":
            self._decide(known.values())
            return
        missing = [_unchecked(name, folder) for name in sorted(self.names - known.keys())]
        self._decide([*known.values(), *missing])

    async def check(
        self,
        client: AgentServerClient,
        on_progress: Callable[[Progress], None] = lambda progress: None,
        interrupted: Callable[[], None] = lambda: None,
    ) -> list[TaskReport]:
        """Check the tasks that the cache does not know; raises TasksRefused."""
        if self.mode != "run":
            self.check_cache()
            return []
        capacity = (await client.health()).capacity
        at_once = max(1, min(capacity, at_once_here()))
        checker = Checker(client, self._folder, self._cache(), at_once, on_progress, interrupted)
        reports = await checker.check(self.names)
        self._decide(reports)
        return reports

    def _decide(self, reports: Iterable[TaskReport]) -> None:
        """Refuse what is not admitted; without a solution is no reason to refuse in mode `run`."""
        refused = []
        self.unproven.clear()
        for report in reports:
            if report.state is State.UNPROVEN and self.mode == "run":
                self.unproven.append(report.task)
            elif report.state is not State.ADMITTED:
                refused.append(report)
        if refused:
            refused.sort(key=lambda report: report.task)
            raise TasksRefused(refused, len(self.names))


def at_once_here() -> int:
    """Trials at once that keep this machine busy: one for each core, at least two."""
    return max(2, len(os.sched_getaffinity(0)))


def _unchecked(name: str, folder: Path | None) -> TaskReport:
    fix = "run `miles tasks check` on it"
    if folder is None:
        fix = "set --tasks-dir to the folder that the agent server has, and " + fix
    return TaskReport(
        task=name,
        state=State.UNDECIDED,
        reasons=["it was not checked as it is now"],
        fixes=[fix],
    )
