"""Checks of a whole configuration before anything is started, so that mistakes show in seconds."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from miles_core.cluster.runs import cache_dir
from miles_core.cluster.task_gate import gate
from miles_core.data.prepare import PreparedData, prepare_rows
from miles_core.preflight.checks import (
    check_agent_server,
    check_local,
    check_services,
    check_task_ids,
    local_tasks,
    require,
)

if TYPE_CHECKING:
    from miles_core.config.schema import MilesConfig

# Larger inputs are converted by the flow, where progress shows.
SMALL_BYTES = 64 * 1024 * 1024


def prepared_rows(config: MilesConfig, held_out: bool = False) -> PreparedData:
    """The rows of a configuration, converted unless the same content was before."""
    data = config.data
    source = data.eval_prompt_data if held_out else data.prompt_data
    assert source is not None, "asked for held-out rows that the configuration does not name"
    return prepare_rows(
        source,
        cache_dir(config),
        prompt_key=data.prompt_key,
        id_key=data.id_key,
        agent_name=data.agent_name,
    )


def instance_ids(rows: Path) -> set[str]:
    """The task ids of prepared rows."""
    with rows.open() as lines:
        return {json.loads(line)["metadata"]["instance_id"] for line in lines}


def check_early(config: MilesConfig) -> None:
    """Check paths, programs, ports, services, rows, task ids and what is known of the tasks.

    Raises UserError. What is not known of the tasks yet is found out by the flow.
    """
    require(check_local(config))
    require(asyncio.run(check_services(config)))
    ids: set[str] = set()
    for path in (config.data.prompt_data, config.data.eval_prompt_data):
        if path is not None and path.is_file() and path.stat().st_size <= SMALL_BYTES:
            held_out = path is config.data.eval_prompt_data
            ids |= instance_ids(prepared_rows(config, held_out).path)
    url = config.agent_server.agent_server_url
    if url is None:
        tasks_dir = config.agent_server.tasks_dir
        require(check_task_ids(ids, local_tasks(tasks_dir), str(tasks_dir)))
        gate(config, ids, config.agent_server.sandbox).check_cache()
        return
    token = os.environ.get("HARBOR_ADMIN_SECRET")
    require(asyncio.run(check_agent_server(config, url, token, ids)).problems)
