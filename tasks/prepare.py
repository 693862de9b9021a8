"""The preparing tasks: rows, agent server, model, conversion. Each is skipped when its output fits.

Prefect caches nothing here: what may be reused is decided by manifests and fingerprints.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import httpx
from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.tasks import Task

from miles_core.cluster import local_client
from miles_core.cluster.preparation import record_inputs, run_module, stage
from miles_core.cluster.runs import cache_dir
from miles_core.config.schema import MilesConfig
from miles_core.runs.directory import RunDir

Check = Callable[[], None]


def transient(_task: Task, _task_run: TaskRun, state: State) -> bool:
    """Whether a failure may pass by itself: connections, not configurations."""
    error = state.result(raise_on_failure=False)
    return isinstance(error, (ConnectionError, httpx.TransportError))


@task(
    name="prepare-data",
    cache_policy=NO_CACHE,
    retries=2,
    retry_delay_seconds=5,
    retry_condition_fn=transient,
)
def prepare_data(run: RunDir, config: MilesConfig) -> Path:
    """Rows in the run's format, converted unless the same content was before."""
    from miles_core.cluster.early import prepared_rows

    with stage(run, "data") as result:
        prepared = prepared_rows(config)
        result.skipped = prepared.skipped
        record_inputs(run, rows=str(prepared.path.absolute()))
        if config.data.eval_prompt_data is not None:
            held_out = prepared_rows(config, held_out=True)
            record_inputs(run, eval_rows=str(held_out.path.absolute()))
    get_run_logger().info("%d rows in %s", prepared.rows, prepared.path)
    return prepared.path


@task(
    name="verify-agent-server",
    cache_policy=NO_CACHE,
    retries=2,
    retry_delay_seconds=5,
    retry_condition_fn=transient,
)
def verify_agent_server(run: RunDir, config: MilesConfig, rows: Path, check: Check) -> str:
    """An agent server that answers, has room and every task, and gives up before its client."""
    from miles_core.cluster.early import instance_ids, prepared_rows
    from miles_core.cluster.local_secrets import read_secrets
    from miles_core.cluster.task_gate import admit_tasks
    from miles_core.preflight.checks import check_agent_server, require

    with stage(run, "agent_server"):
        cluster = local_client.wait_ready(run, config, parts=("agent_server",), interrupted=check)
        url = cluster.agent_server_url
        token = read_secrets(run)["HARBOR_ADMIN_SECRET"] or None
        ids = instance_ids(rows)
        if config.data.eval_prompt_data is not None:
            ids |= instance_ids(prepared_rows(config, held_out=True).path)
        report = asyncio.run(check_agent_server(config, url, token, ids))
        for warning in report.warnings:
            get_run_logger().warning("%s", warning)
        require(report.problems)
        assert report.health is not None
        sandbox = report.health.sandbox_kind
        for name in admit_tasks(run, config, ids, (url, token, sandbox), check):
            get_run_logger().warning("task %s has no solution that could prove it", name)
        record_inputs(run, agent_server_url=url)
    return url


@task(name="prepare-model", cache_policy=NO_CACHE)
def prepare_model(run: RunDir, config: MilesConfig, check: Check) -> Path:
    """The policy's Hugging Face directory: given, or made from the recipe and warm-started.

    What the settings ask of a made model shows here; of a given one the preflight has seen it.
    """
    from miles_core.preflight.checks import check_model, require

    model = config.model
    if model.hf_checkpoint is not None:
        record_inputs(run, hf_checkpoint=str(model.hf_checkpoint.absolute()))
        return model.hf_checkpoint
    with stage(run, "model") as result:
        argv = ["miles_cli.main", "model", "init", "--recipe", str(model.model_recipe)]
        argv += ["--cache-dir", str(cache_dir(config).absolute()), "--json"]
        answer = run_module(run, "model", argv, check)
        result.skipped = not answer["made"]
        record_inputs(run, hf_checkpoint=answer["path"])
    require(check_model(config, Path(answer["path"])))
    return Path(answer["path"])


@task(name="convert-checkpoint", cache_policy=NO_CACHE)
def convert_checkpoint(run: RunDir, config: MilesConfig, hf_dir: Path, check: Check) -> Path:
    """The policy as torch_dist, kept under the fingerprint of its source."""
    from miles_core.cluster.runs import weights_fingerprint

    with stage(run, "convert") as result:
        key = weights_fingerprint(hf_dir)[:16]
        out = (cache_dir(config) / "torch_dist" / key).absolute()
        argv = ["miles_core.checkpoints.convert", str(hf_dir.absolute()), str(out), "--json"]
        answer = run_module(run, "convert", argv, check)
        result.skipped = answer["skipped"]
        reference = config.model.ref_load.absolute() if config.model.ref_load else out
        record_inputs(run, torch_dist=str(out), ref_torch_dist=str(reference))
    return out
