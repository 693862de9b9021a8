"""The training task: a monitor of the run's Ray job, retried while the disk allows it."""

from __future__ import annotations

from collections.abc import Callable

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.tasks import Task

from miles_core.cluster.supervise import AttemptFailed, Supervisor
from miles_core.config.schema import MilesConfig
from miles_core.runs.directory import RunDir

# The run directory bounds the attempts that make no progress; this only has to be larger.
RETRIES = 1000


def another_attempt(_task: Task, _task_run: TaskRun, state: State) -> bool:
    """Whether the supervisor said that the run may be tried again."""
    return isinstance(state.result(raise_on_failure=False), AttemptFailed)


@task(
    name="train-until-done",
    cache_policy=NO_CACHE,
    retries=RETRIES,
    retry_condition_fn=another_attempt,
)
def train_until_done(run: RunDir, config: MilesConfig, cancelled: Callable[[], str | None]) -> None:
    """Follow one attempt of the run to its end; Prefect's retry makes the next one."""
    logger = get_run_logger()
    Supervisor(
        run, config, cancelled=cancelled, write=lambda line: logger.info("%s", line)
    ).follow_attempt()
