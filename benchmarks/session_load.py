"""The agents of `benchmarks/sessions.py`: a process that drives sessions over bare HTTP.

    python benchmarks/session_load.py PLAN.json

Every session has one connection that stays open and asks its turns one after the other; bodies
are made of bytes that were encoded before, and answers are not parsed. Prints one JSON object.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson

try:
    from uvloop import run
except ImportError:
    from asyncio import run


@dataclass(frozen=True)
class Plan:
    """What to do.

    `pause_s` is what an active agent waits before each of its turns, `repeat` how often its text
    stands in one of its messages.
    """

    url: str
    token: str
    session: dict[str, Any]
    sessions: int
    turns: int
    user_texts: list[str]
    answer: str
    idle_sessions: int = 0
    idle_turns: int = 1
    pause_s: float = 0.0
    repeat: int = 1


class Agent:
    """One session over one connection; `ids` names it."""

    def __init__(self, plan: Plan, number: int) -> None:
        self.plan = plan
        self.number = number
        self.history: list[bytes] = []
        self.said = orjson.dumps({"role": "assistant", "content": plan.answer})
        self.latencies: list[float] = []

    async def open(self) -> None:
        parts = urlsplit(self.plan.url)
        self.host = parts.netloc
        self.reader, self.writer = await asyncio.open_connection(
            parts.hostname, parts.port, limit=2**26
        )
        created = orjson.loads(
            await self.call("POST", "/sessions", orjson.dumps(self.plan.session))
        )
        self.path = created["path"]

    async def call(self, method: str, path: str, body: bytes = b"") -> bytes:
        """The body of an answer, which has to be a 200 of a known length."""
        head = (
            f"{method} {path} HTTP/1.1\r\nhost: {self.host}\r\n"
            f"authorization: Bearer {self.plan.token}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        self.writer.write(head.encode() + body)
        got = (await self.reader.readuntil(b"\r\n\r\n")).lower()
        size = int(got.split(b"content-length:")[1].split(b"\r\n")[0])
        answer = await self.reader.readexactly(size)
        if b" 200 " not in got.split(b"\r\n")[0]:
            raise RuntimeError(f"{method} answered {got[:40]!r}: {answer[:500]!r}")
        return answer

    async def turn(self, number: int) -> None:
        """One model call that repeats the history and adds a message."""
        texts = self.plan.user_texts
        text = f"{self.number} {number} {texts[(self.number + number) % len(texts)]}"
        if self.number < self.plan.sessions:
            text *= self.plan.repeat
        self.history.append(orjson.dumps({"role": "user", "content": text}))
        body = b'{"model":"policy","messages":[' + b",".join(self.history) + b"]}"
        began = time.perf_counter()
        await self.call("POST", f"{self.path}/v1/chat/completions", body)
        self.latencies.append(time.perf_counter() - began)
        self.history.append(self.said)

    async def turns(self, count: int, pause_s: float) -> None:
        if pause_s:
            await asyncio.sleep(pause_s * (self.number % 64) / 64)
        for number in range(count):
            await self.turn(number)
            if pause_s:
                await asyncio.sleep(pause_s)


def line(name: str, value: dict[str, Any]) -> None:
    """Tell the parent that a phase is over; it reads CPU and memory meanwhile."""
    print(json.dumps({"phase": name, **value}), flush=True)
    sys.stdin.readline()


async def read_samples(agent: Agent) -> dict[str, Any]:
    """What a session recorded, in figures."""
    found = orjson.loads(await agent.call("GET", f"{agent.path}/samples"))
    tokens = [len(sample["tokens"]) for sample in found["samples"]]
    rows = [base64.b64decode(sample.get("routed_experts") or "") for sample in found["samples"]]
    routing = [hashlib.sha256(data).hexdigest() for data in rows]
    return {"model_calls": found["model_calls"], "tokens": tokens, "routing": routing}


async def main() -> None:
    plan = Plan(**json.loads(Path(sys.argv[1]).read_text()))
    idle = [Agent(plan, plan.sessions + number) for number in range(plan.idle_sessions)]
    active = [Agent(plan, number) for number in range(plan.sessions)]
    for agent in [*idle, *active]:
        await agent.open()
    for agent in idle:
        await agent.turns(plan.idle_turns, 0)
    line("opened", {})
    began, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(agent.turns(plan.turns, plan.pause_s) for agent in active))
    wall_s = time.perf_counter() - began
    latencies = [latency for agent in active for latency in agent.latencies]
    line("driven", {"wall_s": wall_s, "cpu_s": time.process_time() - cpu, "latencies": latencies})
    began = time.perf_counter()
    found = [await read_samples(agent) for agent in active]
    line("read", {"wall_s": time.perf_counter() - began, "sessions": found})


if __name__ == "__main__":
    run(main())
