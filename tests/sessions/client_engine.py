"""An engine with SGLang's `/generate` that says what a script tells it, streamed or not."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from client_truth import END, ids, text_of
from session_helpers import until
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

PIECE = 8
"""Ids of a piece of a streamed answer."""


@dataclass(frozen=True)
class Slow:
    """An answer that takes `seconds`; a streamed one is spread over them."""

    text: str
    seconds: float = 60.0


@dataclass(frozen=True)
class Events:
    """A stream of these events, `seconds` apart; `ended` tells `[DONE]` after them."""

    events: list[bytes]
    seconds: float = 0.15
    ended: bool = True


@dataclass
class Call:
    """One request and what was answered; `output_ids` is empty unless an answer was complete."""

    rid: str
    body: dict[str, Any]
    version: int
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def input_ids(self) -> list[int]:
        return self.body["input_ids"]

    @property
    def prompt(self) -> str:
        return text_of(self.input_ids)


class StepEngine:
    """Says `script`, a list that is used up, or what `say` makes of a prompt once it is empty.

    A step is a text, `Slow`, `Events`, an int (an HTTP status), or bytes (a body as it is).
    """

    def __init__(self) -> None:
        self.script: list[Any] = []
        self.say: Callable[[str], str | Slow] | None = None
        self.calls: list[Call] = []
        self.aborted: list[str] = []
        self.version = 4
        self.url = ""

    def reset(self, script: list[Any], say: Callable[[str], str | Slow] | None = None) -> None:
        """Begin a new episode."""
        self.script, self.say, self.calls = script, say, []

    def reset_script(self, script: list[Any]) -> None:
        """What is said next; all that was to be said has been."""
        assert not self.script, f"not said: {self.script}"
        self.script = script

    async def generate(self, request: Request) -> Response:
        body = await request.json()
        call = Call(body["rid"], body, self.version)
        self.calls.append(call)
        if self.script:
            step = self.script.pop(0)
        else:
            assert self.say is not None, f"the script is used up by {call.prompt[-300:]!r}"
            step = self.say(call.prompt)
        if isinstance(step, int):
            return JSONResponse({"error": {"message": "scripted"}}, status_code=step)
        if isinstance(step, bytes):
            return Response(step, media_type="application/json")
        if isinstance(step, Events):
            return StreamingResponse(_told(step), media_type="text/event-stream")
        slow = step if isinstance(step, Slow) else Slow(step, 0.0)
        output = [*ids(slow.text), END][: body["sampling_params"]["max_new_tokens"]]
        if body.get("stream"):
            return StreamingResponse(
                self.pieces(call, output, slow.seconds), media_type="text/event-stream"
            )
        if slow.seconds and not await self.not_aborted(call.rid, slow.seconds):
            return JSONResponse(self.answer(call, output[:3], {"type": "abort", "message": "x"}))
        return JSONResponse(self.whole(call, output))

    async def pieces(self, call: Call, output: list[int], seconds: float) -> AsyncIterator[bytes]:
        """Each event tells all ids so far, as SGLang's do."""
        ends = [*range(PIECE, len(output), PIECE), len(output)]
        for end in ends:
            if seconds and not await self.not_aborted(call.rid, seconds / len(ends)):
                yield _event(self.answer(call, output[:end], {"type": "abort", "message": "x"}))
                break
            done = end == len(output)
            yield _event(
                self.whole(call, output) if done else self.answer(call, output[:end], None)
            )
            await asyncio.sleep(0)
        yield b"data: [DONE]\n\n"

    async def not_aborted(self, rid: str, seconds: float) -> bool:
        """Wait; False as soon as the generation was aborted."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while loop.time() < deadline:
            if rid in self.aborted:
                return False
            await asyncio.sleep(0.02)
        return rid not in self.aborted

    def whole(self, call: Call, output: list[int]) -> dict[str, Any]:
        """A complete answer, remembered as one."""
        call.output_ids = output
        stopped = output[-1] == END
        reason = {"type": "stop", "matched": END} if stopped else {"type": "length"}
        answer = self.answer(call, output, reason)
        call.logprobs = [pair[0] for pair in answer["meta_info"]["output_token_logprobs"]]
        return answer

    def answer(
        self, call: Call, output: list[int], reason: dict[str, Any] | None
    ) -> dict[str, Any]:
        seed = len(call.input_ids) + self.calls.index(call)
        pairs = [[-((n * 7 + seed) % 97 + 1) / 16, i, None] for n, i in enumerate(output)]
        return {
            "text": text_of(output),
            "output_ids": output,
            "meta_info": {
                "id": call.rid,
                "finish_reason": reason,
                "prompt_tokens": len(call.input_ids),
                "completion_tokens": len(output),
                "weight_version": str(call.version),
                "output_token_logprobs": pairs,
            },
        }

    async def abort(self, request: Request) -> Response:
        self.aborted.append((await request.json())["rid"])
        return JSONResponse({})


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


async def _told(step: Events) -> AsyncIterator[bytes]:
    for event in step.events:
        yield b"data: " + event + b"\n\n"
        await asyncio.sleep(step.seconds)
    if step.ended:
        yield b"data: [DONE]\n\n"


@contextlib.contextmanager
def step_engine() -> Iterator[StepEngine]:
    """A served engine, in a thread of this process."""
    engine = StepEngine()
    app = Starlette(
        routes=[
            Route("/generate", engine.generate, methods=["POST"]),
            Route("/abort_request", engine.abort, methods=["POST"]),
        ]
    )
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        until(lambda: server.started)
        engine.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        yield engine
    finally:
        server.should_exit = server.force_exit = True
        thread.join(20)
