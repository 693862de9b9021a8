"""The flow `train_agent`: from prompt rows to a trained agent.

The Ray job is the run; this flow prepares it, supervises it, and may die at any time. It resumes
from the run directory when it is started again.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "180")
os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")

from prefect import Flow, flow, get_run_logger  # noqa: E402  (reads the settings above)
from prefect.client.schemas.objects import FlowRun, State  # noqa: E402
from prefect.runtime import flow_run as this_flow_run  # noqa: E402
from prefect.states import Cancelled  # noqa: E402

from miles_core.cluster import local_client  # noqa: E402
from miles_core.cluster.runs import (  # noqa: E402
    named,
    open_run,
    point_latest,
    run_path,
    with_absolute_paths,
)
from miles_core.cluster.stop import release, stop_run  # noqa: E402
from miles_core.cluster.supervise import RunCancelled, stop_file  # noqa: E402
from miles_core.config.schema import MilesConfig  # noqa: E402
from miles_core.runs.directory import RunDir  # noqa: E402
from miles_core.runs.fold import FINAL_STATES, fold  # noqa: E402
from miles_core.runs.journal import Journal, read  # noqa: E402
from miles_core.runs.lock import run_lock  # noqa: E402
from tasks.context import canceller  # noqa: E402
from tasks.prepare import (  # noqa: E402
    convert_checkpoint,
    prepare_data,
    prepare_model,
    verify_agent_server,
)
from tasks.telemetry import Mirror  # noqa: E402
from tasks.train import train_until_done  # noqa: E402

_foreground = threading.Event()  # set when a person's terminal owns the flow


def _named(config: MilesConfig, flow_run_id: Any) -> MilesConfig:
    """A run without a name is called by its preset and flow run, so that a retry finds it."""
    config = with_absolute_paths(config)
    return named(config, f"{config.preset}-{str(flow_run_id)[:8]}")


def _run_of(flow_run: FlowRun) -> RunDir | None:
    """The run of a flow run, from its parameters; None before the run was made."""
    config = MilesConfig.model_validate(flow_run.parameters["config"])
    run = RunDir(run_path(_named(config, flow_run.id)))
    return run if run.exists() else None


def stop_cancelled_run(flow: Flow[Any, Any], flow_run: FlowRun, state: State) -> None:
    """Hook of a cancel: stop the Ray job, free its sandboxes, end what the run started."""
    run = _run_of(flow_run)
    if run is not None:
        stop_run(run, "the Prefect flow run was cancelled", supervisor_wait_s=10.0)


def note_crash(flow: Flow[Any, Any], flow_run: FlowRun, state: State) -> None:
    """Hook of a crash of the flow: the Ray job goes on, and the next start attaches to it."""
    run = _run_of(flow_run)
    if run is not None:
        with Journal(run.journal) as journal:
            journal.append("alarm", kind="flow_crashed", detail=state.message or "")


@contextmanager
def _signals_cancel(run: RunDir) -> Iterator[None]:
    """In a person's terminal, Ctrl-C and SIGTERM cancel the run; a second one interrupts."""
    if not _foreground.is_set() or threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(signum: int, _frame: object) -> None:
        name = signal.Signals(signum).name
        if stop_file(run).exists():
            raise KeyboardInterrupt(name)
        stop_file(run).write_text(name)

    before = {s: signal.signal(s, ask) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _end(run: RunDir, state: str, detail: str) -> None:
    """End what the run started, and journal how it ended unless that was done."""
    release(run)
    stop_file(run).unlink(missing_ok=True)
    if fold(read(run.journal)).state not in FINAL_STATES:
        with Journal(run.journal) as journal:
            journal.append("run_ended", state=state, detail=" ".join(detail.split()))


def _work(run: RunDir, config: MilesConfig, mirror: Mirror) -> None:
    check = canceller(run, mirror.cancelled)
    local_client.start(run, config)
    rows = prepare_data(run, config)
    check()
    verify_agent_server(run, config, rows, check)
    hf_dir = prepare_model(run, config, check)
    convert_checkpoint(run, config, hf_dir, check)
    train_until_done.with_options(retry_delay_seconds=config.cluster.retry_delay_s)(
        run, config, mirror.cancelled
    )


@flow(
    name="train-agent",
    description="Train a language-model agent with GRPO on terminal tasks.",
    on_cancellation=[stop_cancelled_run],
    on_crashed=[note_crash],
    persist_result=False,
)
def train_agent(config: MilesConfig) -> Any:
    """Train an agent, or go on with the run of the same name.

    Args:
        config: Everything that decides what the run does.
    """
    logger = get_run_logger()
    flow_run_id = str(this_flow_run.get_id())
    run = open_run(_named(config, flow_run_id))
    point_latest(run)
    config = run.load_config()
    with run_lock(run, "the flow train-agent"), Mirror(run, flow_run_id) as mirror:
        stop_file(run).unlink(missing_ok=True)
        with _signals_cancel(run):
            logger.info("run directory: %s", run.path)
            if fold(read(run.journal)).completed(config.rollout.num_rollout):
                _end(run, "completed", "")  # it may have come here while its flow was dead
                return str(run.path)
            # A signal that ends this process alone is no Exception: the Ray job goes on.
            try:
                _work(run, config, mirror)
            except RunCancelled as cancel:
                _end(run, "cancelled", str(cancel))
                return Cancelled(message=str(cancel))
            except Exception as error:
                _end(run, "failed", str(error) or repr(error))
                raise
            _end(run, "completed", "")
    return str(run.path)


def run_in_foreground(config: MilesConfig) -> None:
    """Run the flow for a person at a terminal, whose signals cancel it.

    Raises what the flow raises. The state of the run is in its directory.
    """
    _foreground.set()
    try:
        train_agent(config, return_state=True)
    finally:
        _foreground.clear()
