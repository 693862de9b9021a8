"""SGLang's routes over an engine, as a bare ASGI application."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import orjson

from miles_core.engines.engine import Engine
from miles_core.engines.generate import Waiter, parse_generate
from miles_core.engines.http_weights import weight_routes
from miles_core.engines.sampling import RequestError
from miles_core.errors import UserError

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Answer = tuple[int, Any]
MAX_BODY = 64 * 2**20


class EngineApp:
    """Routes of one engine; an instance is an ASGI application."""

    def __init__(self, engine: Engine, served_name: str) -> None:
        self.engine = engine
        self.served_name = served_name
        self.started = time.time()
        self.posts: dict[str, Callable[[dict[str, Any]], Awaitable[Answer]]] = {
            "/abort_request": self.abort,
            "/pause_generation": self.pause,
            "/continue_generation": self.resume,
            "/flush_cache": self.flush,
            "/update_weights_from_disk": self.update_from_disk,
            **weight_routes(engine.updates),
        }
        self.gets: dict[str, Callable[[], Answer]] = {
            "/health": self.health,
            "/ready": self.health,
            "/model_info": self.model_info,
            "/get_model_info": self.model_info,
            "/server_info": self.server_info,
            "/get_server_info": self.server_info,
            "/v1/models": self.models,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            return
        path, method = scope["path"], scope["method"]
        if path == "/generate" and method == "POST":
            await self.generate(receive, send)
        elif method in ("GET", "HEAD") and path in self.gets:
            await respond(send, *self.gets[path]())
        elif method == "POST" and path in self.posts:
            await respond(send, *await self._control(path, receive))
        elif method in ("GET", "POST") and path == "/flush_cache":
            await respond(send, *await self.flush({}))
        elif method == "GET" and path == "/weights_digest":
            await respond(send, *await self._answered(self.weights_digest()))
        elif path in self.posts or path in self.gets or path == "/generate":
            await respond(send, 405, error(f"{method} is not allowed on {path}"))
        else:
            await respond(send, 404, error(f"no route {path}"))

    async def _control(self, path: str, receive: Receive) -> Answer:
        async def answer() -> Answer:
            return await self.posts[path](await read_object(receive))

        return await self._answered(answer())

    @staticmethod
    async def _answered(answer: Awaitable[Answer]) -> Answer:
        try:
            return await answer
        except (RequestError, UserError) as problem:
            return 400, {"success": False, **error(str(problem)), "message": str(problem)}
        except RuntimeError as problem:
            return 503, {"success": False, **error(str(problem)), "message": str(problem)}

    # -- generation ----------------------------------------------------------------------------

    async def generate(self, receive: Receive, send: Send) -> None:
        """`/generate`: one answer, a list of them, or a stream of server-sent events."""
        try:
            if not self.engine.alive:
                await respond(send, 503, error("the engine has stopped"))
                return
            if not self.engine.has_weights:
                await respond(send, 503, error("the engine holds no weights yet"))
                return
            waiter = Waiter(self.engine)
            batched, streamed = parse_generate(await read_object(receive), waiter)
        except RequestError as problem:
            await respond(send, 400, error(str(problem)))
            return
        gone = asyncio.create_task(wait_disconnect(receive))
        waiter.submit()
        try:
            if streamed:
                await self._stream(waiter, send, gone)
                return
            done = asyncio.ensure_future(waiter.done)
            await asyncio.wait((done, gone), return_when=asyncio.FIRST_COMPLETED)
            if not done.done():
                return
            answers = waiter.answers()
            await respond(send, 200, answers if batched else answers[0])
        finally:
            gone.cancel()
            waiter.cancel_unfinished()

    async def _stream(self, waiter: Waiter, send: Send, gone: asyncio.Task[None]) -> None:
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        while not gone.done():
            event = asyncio.ensure_future(waiter.events.get())
            await asyncio.wait((event, gone), return_when=asyncio.FIRST_COMPLETED)
            if not event.done():
                event.cancel()
                return
            item = event.result()
            data = b"[DONE]" if item is None else orjson.dumps(item)
            body = b"data: " + data + b"\n\n"
            await send({"type": "http.response.body", "body": body, "more_body": item is not None})
            if item is None:
                return

    # -- control -------------------------------------------------------------------------------

    async def abort(self, body: dict[str, Any]) -> Answer:
        """`/abort_request` with `rid` (also of a whole batch) or `abort_all`."""
        rid = body.get("rid")
        if not body.get("abort_all") and not (isinstance(rid, str) and rid):
            raise RequestError("rid must be a string, or abort_all true")
        message = body.get("abort_message") or "aborted by abort_request"
        count = await asyncio.wrap_future(
            self.engine.abort(None if body.get("abort_all") else rid, str(message))
        )
        return 200, {"success": True, "aborted": count}

    async def pause(self, body: dict[str, Any]) -> Answer:
        mode = body.get("mode", "abort")
        count = await asyncio.wrap_future(self.engine.pause(mode))
        return 200, {"status": "ok", "message": f"paused ({mode}); {count} requests", "held": count}

    async def resume(self, body: dict[str, Any]) -> Answer:
        await asyncio.wrap_future(self.engine.resume())
        return 200, {"status": "ok", "message": "generation continues"}

    async def flush(self, body: dict[str, Any]) -> Answer:
        await asyncio.wrap_future(self.engine.flush())
        return 200, {"success": True, "message": "cache flushed"}

    async def update_from_disk(self, body: dict[str, Any]) -> Answer:
        """`/update_weights_from_disk`; a failure answers 400 and changes nothing."""
        path = body.get("model_path")
        if not isinstance(path, str) or not path:
            raise RequestError("model_path must be a string")
        if body.get("load_format") not in (None, "auto", "safetensors"):
            raise RequestError(f"load_format {body['load_format']!r} is not supported")
        version = body.get("weight_version")
        held = await asyncio.to_thread(
            self.engine.update_weights,
            Path(path),
            None if version is None else str(version),
            bool(body.get("abort_all_requests", False)),
            bool(body.get("flush_cache", True)),
            bool(body.get("keep_pause", False)),
        )
        message = f"serving {path} as version {self.engine.version}"
        return 200, {"success": True, "message": message, "num_paused_requests": held}

    # -- information ---------------------------------------------------------------------------

    def health(self) -> Answer:
        """200 while the engine's thread lives, else 503."""
        alive = self.engine.alive
        return (200 if alive else 503), {"status": "ok" if alive else "stopped"}

    async def weights_digest(self) -> Answer:
        """`/weights_digest`: of the served weights, in the engine's type (see WeightUpdates)."""
        return 200, await asyncio.to_thread(self.engine.updates.digest)

    def model_info(self) -> Answer:
        return 200, {
            "model_path": self.engine.model_path,
            "tokenizer_path": str(self.engine.options.model),
            "is_generation": True,
            "weight_version": self.engine.version,
            "context_length": self.engine.context_length,
        }

    def server_info(self) -> Answer:
        engine, scheduler = self.engine, self.engine.scheduler
        return 200, {
            **self.model_info()[1],
            "served_model_name": self.served_name,
            "dtype": engine.options.dtype,
            "max_running_requests": engine.options.max_running_requests,
            "max_total_num_tokens": engine.options.max_total_tokens,
            "num_running_reqs": len(scheduler.running),
            "num_waiting_reqs": len(scheduler.waiting),
            "num_used_tokens": scheduler.pool.used,
            "paused": engine.paused,
            "weight_update_open": engine.updates.is_open,
            "staged_weight_updates": True,
            "has_weights": engine.has_weights,
        }

    def models(self) -> Answer:
        card = {
            "id": self.served_name,
            "object": "model",
            "created": int(self.started),
            "owned_by": "miles-flow",
            "max_model_len": self.engine.context_length,
        }
        return 200, {"object": "list", "data": [card]}


def error(message: str) -> dict[str, Any]:
    """SGLang's error object."""
    return {"error": {"message": message}}


async def respond(send: Send, status: int, content: Any) -> None:
    """Send one JSON answer."""
    body = orjson.dumps(content)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def read_object(receive: Receive) -> dict[str, Any]:
    """The JSON object in a request's body; an empty body is an empty object."""
    body = b""
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise RequestError("the client went away")
        body += message.get("body", b"")
        if len(body) > MAX_BODY:
            raise RequestError(f"the body is larger than {MAX_BODY} bytes")
        more = message.get("more_body", False)
    if not body:
        return {}
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as problem:
        raise RequestError(f"the body is not JSON: {problem}") from problem
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object")
    return value


async def wait_disconnect(receive: Receive) -> None:
    """Return when the client has gone away."""
    while (await receive())["type"] != "http.disconnect":
        pass
