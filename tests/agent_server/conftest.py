"""A running agent server that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_server_helpers import Server, make_task


@pytest.fixture(scope="session")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tasks")
    make_task(root, "answer")
    return root


@pytest.fixture(scope="session")
def server(tasks: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    config = Path(__file__).parents[2] / "examples" / "agents" / "terse.yaml"
    made = Server(
        tmp_path_factory.mktemp("server"),
        tasks,
        *["--agent-config", str(config), "--max-concurrent", "4", "--agent-timeout", "300"],
    )
    yield made
    made.stop()
