"""A run whose Ray head is its own and whose driver is the stand-in."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from miles_core.cluster import local_client
from miles_core.config.schema import MilesConfig
from miles_core.runs.directory import RunDir


@pytest.fixture
def make_run(tmp_path: Path, small_config: MilesConfig) -> Iterator[Callable[..., RunDir]]:
    """`make_run(plan, **cluster)` makes a run; its local cluster is ended after the test."""
    made: list[RunDir] = []

    def make(plan: dict[str, Any], **cluster: Any) -> RunDir:
        config = small_config
        config.agent_server.agent_server_url = "http://127.0.0.1:9"
        for key, value in cluster.items():
            setattr(config.cluster, key, value)
        run = RunDir.create(tmp_path / "run", config, {})
        (run.path / "standin.json").write_text(json.dumps(plan))
        (run.path / "inputs.json").write_text("{}")
        made.append(run)
        return run

    yield make
    for run in made:
        assert local_client.stop(run), "the local cluster does not end"
