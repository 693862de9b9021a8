"""A caller that would give up before its turn is refused, not queued."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

pytest.importorskip("harbor")
from agent_server_helpers import SECRET, Server, make_task  # noqa: E402

from miles_core.agent_server.client import AgentServerClient  # noqa: E402
from miles_core.agent_server.protocol import TrialRequest, TrialState  # noqa: E402
from miles_core.agent_server.queueing import QueueEstimate, QueueFull  # noqa: E402

pytestmark = pytest.mark.agent_env


def test_estimate_counts_rounds_of_the_trials_before() -> None:
    queue = QueueEstimate(4)
    queue.check(100, 0.001)  # nothing is known yet
    for seconds in (10.0, 20.0, 30.0):
        queue.ended(seconds)
    assert [queue.wait_s(ahead) for ahead in (0, 3, 4, 7, 8)] == [0, 0, 20, 20, 40]
    queue.check(3, 0.001)  # it starts at once
    queue.check(8, 60.0)
    queue.check(8, None)
    with pytest.raises(QueueFull) as refused:
        queue.check(8, 59.0)
    assert refused.value.retry_s == 20.0


@pytest.fixture
def single(tmp_path: Path) -> Iterator[Server]:
    make_task(tmp_path / "tasks", "answer")
    make_task(tmp_path / "tasks", "long", solve="#!/bin/bash\nsleep 3\n")
    made = Server(tmp_path, tmp_path / "tasks", "--max-concurrent", "1")
    yield made
    made.stop()


def test_a_late_trial_is_refused_and_runs_when_there_is_room(single: Server) -> None:
    request = {"instance_id": "answer", "agent_name": "oracle"}
    headers = {"authorization": f"Bearer {SECRET}"}
    assert single.run("answer").reward == 1.0  # now the server knows how long trials take

    def put(trial_id: str, **fields: object) -> httpx.Response:
        url = f"{single.url}/trials/{trial_id}"
        return httpx.put(url, json={**request, **fields}, headers=headers)

    assert put("t-long", instance_id="long").status_code == 200
    refused = put("t-late", deadline_s=0.01)
    assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["code"] == "queue_full"
    assert httpx.get(f"{single.url}/trials/t-late", headers=headers).status_code == 404
    assert put("t-patient").json()["state"] == TrialState.QUEUED

    async def both() -> list[float | None]:
        """One whose time is over before its turn, and one that has time."""
        async with AgentServerClient(single.url, SECRET) as client:
            wanted = TrialRequest.model_validate(request)
            hasty = client.run("t-hasty", wanted, 0.2)
            waits = client.run("t-waits", wanted, 60.0)
            return [result.reward for result in await asyncio.gather(hasty, waits)]

    assert asyncio.run(both()) == [None, 1.0]
