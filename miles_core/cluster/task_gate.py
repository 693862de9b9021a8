"""A run's question whether its tasks may be trained on; its progress goes to the journal."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from miles_core.admission.gate import Gate
from miles_core.agent_server.client import AgentServerClient
from miles_core.cluster.runs import cache_dir
from miles_core.runs.journal import Journal

if TYPE_CHECKING:
    from miles_core.admission.check import Progress
    from miles_core.config.schema import MilesConfig
    from miles_core.runs.directory import RunDir

_EVERY_S = 2.0
"""Seconds between two events of progress."""

_SHOWN = 10


def gate(config: MilesConfig, names: set[str], sandbox: str) -> Gate:
    """The gate of a configuration, for the tasks of its rows in one kind of sandbox."""
    server = config.agent_server
    return Gate(server.tasks_dir, names, cache_dir(config), sandbox, server.task_check)


def admit_tasks(
    run: RunDir,
    config: MilesConfig,
    names: set[str],
    server: tuple[str, str | None, str],
    interrupted: Callable[[], None],
) -> list[str]:
    """Check the tasks of a run on its agent server (URL, token, kind of sandbox).

    Returns those that are let through although nothing proves them; an alarm tells of them.
    Raises TasksRefused, or what `interrupted` raises.
    """
    url, token, sandbox = server
    asked = gate(config, names, sandbox)
    last = time.monotonic()

    async def check() -> None:
        async with AgentServerClient(url, token) as client:
            await asked.check(client, tell, interrupted)

    with Journal(run.journal) as journal:

        def tell(progress: Progress) -> None:
            nonlocal last
            if progress.cached == progress.total or time.monotonic() - last < _EVERY_S:
                return
            last = time.monotonic()
            journal.append("tasks_checked", **progress.event())

        asyncio.run(check())
        if asked.unproven:
            shown = ", ".join(asked.unproven[:_SHOWN])
            more = f" and {len(asked.unproven) - _SHOWN} more" if asked.unproven[_SHOWN:] else ""
            detail = f"nothing shows that full reward can be reached: no solution in {shown}{more}"
            journal.append("alarm", kind="tasks_unproven", detail=detail)
    return asked.unproven
