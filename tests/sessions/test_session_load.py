"""Many sessions at once: each one's samples are exact, and health is answered all the while."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from client_engine import Call, Slow, StepEngine, step_engine
from client_truth import Line, check_samples, make_byte_tokenizer, user
from session_helpers import TOKEN, server_command, session_server, until

CONTROL = {"Authorization": f"Bearer {TOKEN}"}


class Echo:
    """The engine's answers: what it was asked. A bad client's question takes it half a second."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def __call__(self, prompt: str) -> str | Slow:
        asked = prompt.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
        first = asked not in self.seen
        self.seen.add(asked)
        return Slow(f"you said {asked}", 0.5 * ("slowly" in asked and first))


class Load:
    """One agent: a session, its history and the truth of it.

    Every third one is a bad client: it drops a request and sends it again.
    """

    def __init__(self, http: aiohttp.ClientSession, url: str, number: int) -> None:
        self.http = http
        self.url = url
        self.number = number
        self.messages: list[dict[str, str]] = []
        self.line = Line()

    async def open(self) -> None:
        body = {"max_seq_len": 50_000, "session_id": str(self.number)}
        async with self.http.post(f"{self.url}/sessions", json=body, headers=CONTROL) as response:
            self.session = f"{self.url}{(await response.json())['path']}"

    async def ask(self) -> None:
        body = {"messages": self.messages, "stream": self.number % 2 == 1}
        async with self.http.post(f"{self.session}/v1/chat/completions", json=body) as response:
            text = await response.text()
            assert response.status == 200, text

    async def turn(self, turn: int) -> None:
        bad = self.number % 3 == 2 and turn % 2
        asked = f"agent {self.number} turn {turn}: é☃" + (" slowly" if bad else "")
        self.messages.append({"role": "user", "content": asked})
        if bad:
            impatient = asyncio.create_task(self.ask())
            await asyncio.wait({impatient}, timeout=0.01 * (self.number % 5))
            impatient.cancel()
            await asyncio.gather(impatient, return_exceptions=True)
        await self.ask()
        self.messages.append({"role": "assistant", "content": f"you said {asked}"})
        self.line = self.line.prompt(("\n" if turn else "") + user(asked)).answer(
            f"you said {asked}"
        )

    async def refused(self) -> tuple[int, str]:
        """Status and code of a call that cannot be answered."""
        url = f"{self.session}/v1/chat/completions"
        async with self.http.post(url, json={"messages": self.messages}) as response:
            return response.status, (await response.json())["error"]["code"]

    async def turns(self, first: int, count: int) -> None:
        for turn in range(first, first + count):
            await self.turn(turn)

    async def samples(self) -> dict[str, Any]:
        async with self.http.get(f"{self.session}/samples", headers=CONTROL) as response:
            assert response.status == 200
            return await response.json()


async def watch(http: aiohttp.ClientSession, url: str, done: asyncio.Event) -> list[int]:
    """The statuses of /health while the load runs."""
    found = []
    while not done.is_set():
        async with http.get(f"{url}/health") as response:
            found.append(response.status)
            await response.read()
        await asyncio.sleep(0.02)
    return found


async def drive(url: str, engine: StepEngine, idle: int, active: int, turns: int) -> None:
    """`idle` sessions of one turn beside `active` ones; then each idle one goes on for a turn."""
    engine.reset([], Echo())
    connector = aiohttp.TCPConnector(limit=200)
    async with aiohttp.ClientSession(connector=connector) as http:
        agents = [Load(http, url, number) for number in range(idle + active)]
        await asyncio.gather(*(agent.open() for agent in agents))
        sleeping, busy = agents[active:], agents[:active]
        await asyncio.gather(*(agent.turns(0, 1) for agent in sleeping))
        await asyncio.sleep(2.0)  # they leave memory
        async with http.get(f"{url}/health") as response:
            health = await response.json()
        assert health["sessions"] == idle + active and health["spilled"] == idle + active
        done = asyncio.Event()
        watching = asyncio.create_task(watch(http, url, done))
        await asyncio.gather(*(agent.turns(0, turns) for agent in busy))
        done.set()
        statuses = await watching
        assert len(statuses) > 5 and set(statuses) == {200}
        await asyncio.gather(*(agent.turns(1, 1) for agent in sleeping))
        calls: dict[int, list[Call]] = defaultdict(list)
        for call in engine.calls:
            calls[int(call.prompt.partition("agent ")[2].partition(" ")[0])].append(call)
        for agent in agents:
            own = SimpleNamespace(calls=calls[agent.number])
            check_samples(await agent.samples(), [agent.line], own)


@pytest.mark.parametrize(
    ("idle", "active", "turns"),
    [(60, 24, 6), pytest.param(1000, 64, 30, marks=pytest.mark.slow)],
)
async def test_each_session_is_exact_under_load(
    idle: int, active: int, turns: int, tmp_path: Path
) -> None:
    model = make_byte_tokenizer(tmp_path / "model")
    with (
        step_engine() as engine,
        session_server(model, engine.url, tmp_path, "--spill-after", "0.5") as url,
    ):
        await drive(url, engine, idle, active, turns)


@pytest.mark.slow
async def test_samples_are_read_while_calls_run(tmp_path: Path) -> None:
    """Each reading is whole: turns that have been answered are in it, and each one once."""
    model = make_byte_tokenizer(tmp_path / "model")
    with step_engine() as engine, session_server(model, engine.url, tmp_path) as url:
        engine.reset([], Echo())
        async with aiohttp.ClientSession() as http:
            agent = Load(http, url, 0)
            await agent.open()
            answered, done = 0, asyncio.Event()

            async def ask(caller: int) -> None:
                nonlocal answered
                for number in range(120):
                    body = {"messages": [{"role": "user", "content": f"{caller}-{number}"}]}
                    address = f"{agent.session}/v1/chat/completions"
                    async with http.post(address, json=body) as response:
                        assert response.status == 200, await response.text()
                    answered += 1

            async def read() -> None:
                while not done.is_set():
                    before = answered
                    address = f"{agent.session}/samples"
                    async with http.get(address, headers=CONTROL) as response:
                        text = await response.text()
                    assert response.status == 200, text
                    calls = int(re.findall(r'"model_calls":(\d+)', text[:200])[0])
                    assert text.count('"rid":') == calls >= before

            readers = [asyncio.create_task(read()) for _ in range(4)]
            await asyncio.gather(*(ask(caller) for caller in range(8)))
            done.set()
            await asyncio.gather(*readers)
            assert (await agent.samples())["model_calls"] == 960


@contextlib.contextmanager
def started(tmp_path: Path, engine_url: str, port: str) -> Iterator[tuple[str, subprocess.Popen]]:
    """A session server that keeps its sessions in a folder, and its process."""
    ready = tmp_path / "ready.json"
    ready.unlink(missing_ok=True)
    more = ["--ready-file", str(ready), "--port", port, "--spill-dir", str(tmp_path / "kept")]
    command = server_command(tmp_path / "model", engine_url, *more)
    process = subprocess.Popen(command, env={**os.environ, "MILES_SESSION_TOKEN": TOKEN})
    try:
        until(ready.exists)
        yield json.loads(ready.read_text())["url"], process
    finally:
        process.kill()
        process.wait(20)


async def until_it_dies(agent: Load) -> None:
    """Turn after turn; the one that was asked last was not answered."""
    with contextlib.suppress(aiohttp.ClientError):
        for turn in range(10_000):
            await agent.turn(turn)


async def test_a_server_that_is_killed_under_load_loses_no_answer(tmp_path: Path) -> None:
    """What a client was told is in the samples that the next server gives, and is exact."""
    make_byte_tokenizer(tmp_path / "model")
    with step_engine() as engine:
        engine.reset([], Echo())
        async with aiohttp.ClientSession() as http:
            with started(tmp_path, engine.url, "0") as (url, process):
                agents = [Load(http, url, 3 * number) for number in range(16)]
                await asyncio.gather(*(agent.open() for agent in agents))
                running = [asyncio.create_task(until_it_dies(agent)) for agent in agents]
                await asyncio.to_thread(until, lambda: all(len(a.messages) > 10 for a in agents))
                process.kill()
                await asyncio.gather(*running)
            with started(tmp_path, engine.url, url.rpartition(":")[2]):
                for agent in agents:
                    found = await agent.samples()
                    told = agent.line.turns()
                    assert found["model_calls"] in (len(told), len(told) + 1)
                    (sample,) = found["samples"]
                    tokens = agent.line.tokens()
                    assert tuple(sample["tokens"][: len(tokens)]) == tokens
                    spans = [(turn["start"], turn["end"]) for turn in sample["turns"]]
                    expected = [(len(b), len(b) + len(a)) for b, a in told]
                    assert spans[: len(told)] == expected
                    assert (await agent.refused()) == (410, "session_lost")
