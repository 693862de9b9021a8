"""A tokenizer made on the spot, a scripted engine, and a real session server process."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TOKEN = "control-token"
BASH = {
    "type": "function",
    "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}},
}


def make_tokenizer(directory: Path, config: dict[str, Any] | None = None) -> Path:
    """A byte-level BPE with ChatML's special tokens."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    text = [
        'user assistant system tool <tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}'
    ]
    tokenizer.train_from_iterator(text, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "miles_chat_family": "qwen3"} | (config or {})
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


class ScriptedEngine:
    """SGLang's `/generate` with answers from a script; remembers every request.

    An answer is a list of ids, a dict (sent as it is), an int (an HTTP status), or "hang"; it
    takes `delay_s`, and comes once `together` calls have run at the same time. A stream comes token
    by token, `pace_s` seconds apart; with `break_after` it ends after so many of them.
    """

    def __init__(self) -> None:
        self.script: list[Any] = []
        self.requests: list[dict[str, Any]] = []
        self.sent: dict[str, tuple[list[int], list[float]]] = {}
        self.aborted: list[str] = []
        self.keys: list[str | None] = []
        self.version = "3"
        self.pace_s = 0.0
        self.delay_s = 0.02
        self.together = 0
        self.experts: Callable[[int, int], bytes] | None = None
        self.break_after: int | None = None
        self.in_flight = self.most_in_flight = 0
        self.url = ""

    async def generate(self, request: Request) -> Response:
        body = await request.json()
        self.requests.append(body)
        self.keys.append(request.headers.get("x-smg-routing-key"))
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            step = self.script.pop(0)
            if step == "hang":
                for _ in range(1200):
                    await asyncio.sleep(0.05)
                    if body["rid"] in self.aborted:
                        return JSONResponse(self.answer(body, [5], {"type": "abort"}))
            await asyncio.sleep(self.delay_s)
            for _ in range(1000):
                if self.most_in_flight >= self.together:
                    break
                await asyncio.sleep(0.02)
        finally:
            self.in_flight -= 1
        if isinstance(step, int):
            return JSONResponse({"error": {"message": "broken"}}, status_code=step)
        whole = step if isinstance(step, dict) else self.answer(body, step)
        if body["stream"] and isinstance(step, list):
            return StreamingResponse(self.events(whole), media_type="text/event-stream")
        return JSONResponse(whole)

    async def events(self, whole: dict[str, Any]) -> AsyncIterator[bytes]:
        """SGLang's stream: each event holds the answer so far."""
        ids, meta = whole["output_ids"], whole["meta_info"]
        logprobs = meta["output_token_logprobs"]
        for count in range(1, len(ids) + 1):
            so_far = {**meta, "output_token_logprobs": logprobs[:count]}
            if count < len(ids):
                so_far["finish_reason"] = None
            event = {"output_ids": ids[:count], "meta_info": so_far}
            yield b"data: " + json.dumps(event).encode() + b"\n\n"
            if count == self.break_after:
                raise ConnectionResetError("the engine breaks off")
            await asyncio.sleep(self.pace_s)
        yield b"data: [DONE]\n\n"

    def answer(
        self, body: dict[str, Any], ids: list[int], reason: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        params = body["sampling_params"]
        cut = ids[: params["max_new_tokens"]]
        stopped = cut[-1] in params["stop_token_ids"]
        reason = reason or ({"type": "stop", "matched": cut[-1]} if stopped else {"type": "length"})
        logprobs = [-((i * 7 + len(body["input_ids"])) % 97) / 16 for i in range(len(cut))]
        self.sent[body["rid"]] = (cut, logprobs)
        meta: dict[str, Any] = {}
        if self.experts is not None:
            end = len(body["input_ids"]) + len(cut) - 1
            data = self.experts(body["routed_experts_start_len"], end)
            meta["routed_experts"] = base64.b64encode(data).decode()
        return {
            "output_ids": cut,
            "meta_info": {
                **meta,
                "id": body["rid"],
                "finish_reason": reason,
                "weight_version": self.version,
                "output_token_logprobs": [[p, i, None] for p, i in zip(logprobs, cut, strict=True)],
            },
        }

    async def abort(self, request: Request) -> JSONResponse:
        self.aborted.append((await request.json())["rid"])
        return JSONResponse({})


@contextlib.contextmanager
def serving(engine: ScriptedEngine) -> Iterator[None]:
    app = Starlette(
        routes=[
            Route("/generate", engine.generate, methods=["POST"]),
            Route("/abort_request", engine.abort, methods=["POST"]),
        ]
    )
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    until(lambda: server.started)
    engine.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    try:
        yield
    finally:
        server.should_exit = server.force_exit = True
        thread.join(20)


def until(condition: Callable[[], Any], seconds: float = 30.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
    return value


def server_command(tokenizer: Path, engine_url: str, *more: str) -> list[str]:
    module = "miles_core.sessions.server"
    return [sys.executable, "-m", module, "--tokenizer", str(tokenizer),
            "--engine-url", engine_url, *more]  # fmt: skip


@contextlib.contextmanager
def session_server(tokenizer: Path, engine_url: str, scratch: Path, *more: str) -> Iterator[str]:
    ready = scratch / f"ready-{time.monotonic_ns()}.json"
    command = server_command(tokenizer, engine_url, "--ready-file", str(ready), *more)
    process = subprocess.Popen(command, env={**os.environ, "MILES_SESSION_TOKEN": TOKEN})
    try:
        until(lambda: ready.exists() or process.poll() is not None)
        assert process.poll() is None
        yield json.loads(ready.read_text())["url"]
    finally:
        process.terminate()
        assert process.wait(20) in (0, -15)


class Agent:
    """An agent's and a trainer's view of one session."""

    def __init__(self, url: str, http: httpx.Client, **request: Any) -> None:
        self.http = http
        self.control = {"Authorization": f"Bearer {TOKEN}"}
        body = {"max_seq_len": 4000, **request}
        response = http.post(f"{url}/sessions", json=body, headers=self.control)
        assert response.status_code == 200, response.text
        self.id = response.json()["session_id"]
        self.url = f"{url}{response.json()['path']}"

    def ask(self, messages: list[Any], **fields: Any) -> httpx.Response:
        body = {"model": "openai/policy", "messages": messages, **fields}
        return self.http.post(f"{self.url}/v1/chat/completions", json=body)

    def message(self, messages: list[Any], **fields: Any) -> dict[str, Any]:
        response = self.ask(messages, **fields)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["message"]

    def samples(self) -> dict[str, Any]:
        response = self.http.get(f"{self.url}/samples", headers=self.control)
        assert response.status_code == 200, response.text
        return response.json()

    def delete(self) -> int:
        return self.http.delete(self.url, headers=self.control).status_code
