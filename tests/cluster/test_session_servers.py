"""The session servers of an attempt: one that dies is started anew and has lost no turn."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "sessions"))
from session_helpers import TOKEN, ScriptedEngine, make_tokenizer, serving  # noqa: E402

from miles_core.cluster.services import ServiceError  # noqa: E402
from miles_core.cluster.session_servers import MOST_RESTARTS, SessionServers  # noqa: E402
from miles_core.config.schema import MilesConfig  # noqa: E402
from miles_core.sessions.client import SessionClient  # noqa: E402
from miles_core.sessions.families import load_family  # noqa: E402

USER = {"role": "user", "content": "hello"}


@pytest.fixture
def engine() -> Iterator[ScriptedEngine]:
    engine = ScriptedEngine()
    with serving(engine):
        yield engine


async def ask(base_url: str) -> httpx.Response:
    async with httpx.AsyncClient(timeout=20, trust_env=False) as http:
        return await http.post(f"{base_url}/chat/completions", json={"messages": [USER]})


def pid_of(tmp_path: Path, url: str) -> int:
    """The process that says that it serves at a URL."""
    said = [
        json.loads(path.read_text()) for path in (tmp_path / "services").glob("*-server-*.json")
    ]
    (pid,) = (ready["pid"] for ready in said if ready["url"] == url)
    return pid


async def until_back(servers: SessionServers, instances: int) -> None:
    for _ in range(300):
        await servers.check()
        if len(servers.instances) == instances:
            return
        await asyncio.sleep(0.1)
    raise AssertionError("the server did not come back")


async def test_a_server_that_dies_comes_back_with_its_samples(
    small_config: MilesConfig, engine: ScriptedEngine, tmp_path: Path
) -> None:
    small_config.sessions.session_server_workers = 2
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    family = load_family(tokenizer)
    told: list[str] = []
    servers = SessionServers(
        small_config, tmp_path / "services", str(tokenizer), TOKEN, told.append
    )
    try:
        servers.start()
        urls = await servers.wait(60)
        await servers.route([engine.url], int(engine.version))
        assert len(set(urls)) == 2 == len(set(servers.instances))
        client = SessionClient(urls, TOKEN)
        one, other = await client.create(400), await client.create(400)
        assert {one.server_url, other.server_url} == set(urls)
        engine.script = [family.render_output({"role": "assistant", "content": "x"})] * 3
        assert (await ask(one.base_url)).status_code == 200
        before = await client.samples(one)
        await servers.check()
        assert told == []
        os.kill(pid_of(tmp_path, one.server_url), signal.SIGKILL)
        # While it is away, what is asked of it waits for it, and new sessions open elsewhere.
        reading = asyncio.create_task(client.samples(one))
        created = await client.create(400)
        await until_back(servers, 3)
        assert await reading == before and before.model_calls == 1
        assert (await ask(one.base_url)).status_code == 410
        assert (await client.samples(one)).end_reason == "session_failed"
        assert (await ask(other.base_url)).status_code == 200
        assert (await ask(created.base_url)).status_code == 200
        assert len(told) == 1 and "signal 9" in told[0]
        await client.aclose()
    finally:
        servers.stop()


async def test_a_server_that_dies_again_and_again_ends_the_attempt(
    small_config: MilesConfig, engine: ScriptedEngine, tmp_path: Path
) -> None:
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    told: list[str] = []
    servers = SessionServers(
        small_config, tmp_path / "services", str(tokenizer), TOKEN, told.append
    )
    try:
        servers.start()
        (url,) = await servers.wait(60)
        for number in range(MOST_RESTARTS):
            os.kill(pid_of(tmp_path, url), signal.SIGKILL)
            await until_back(servers, number + 2)
        os.kill(pid_of(tmp_path, url), signal.SIGKILL)
        with pytest.raises(ServiceError, match="signal 9"):
            for _ in range(100):
                await servers.check()
                await asyncio.sleep(0.05)
        assert len(told) == MOST_RESTARTS
    finally:
        servers.stop()
