"""The session server's routes."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import uuid
from collections.abc import AsyncIterator
from typing import Any

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from miles_core.sessions.chat import ChatService
from miles_core.sessions.chat_request import ChatRequest, parse_request
from miles_core.sessions.errors import ApiError, session_lost
from miles_core.sessions.json_body import read_json
from miles_core.sessions.protocol import SessionCreated, SessionRequest
from miles_core.sessions.responses import CallResponse, json_response
from miles_core.sessions.routing import EngineList
from miles_core.sessions.samples import Snapshot, cut_samples

log = logging.getLogger("miles.sessions")

MAX_BODY = 16 * 2**20
_LONG_BODY = 2**20
_LONGEST_KEY = 255
_TIDY_S = 1.0


class SessionApp:
    """All sessions of one server process. `token` guards the control routes when given."""

    def __init__(self, chat: ChatService, token: str | None) -> None:
        self.chat = chat
        self.store = chat.store
        self.token = token
        self.instance_id = str(uuid.uuid4())
        self._ending = False

    def starlette(self) -> Starlette:
        one = "/sessions/{session_id}"
        return Starlette(
            routes=[
                Route("/health", self.health),
                Route("/engines", self.engines, methods=["PUT"]),
                Route("/sessions", self.create, methods=["POST"]),
                Route(f"{one}/v1/chat/completions", self.completions, methods=["POST"]),
                Route(f"{one}/v1/models", self.models),
                Route(f"{one}/v1/models/{{model:path}}", self.model),
                Route(f"{one}/samples", self.samples),
                Route(one, self.delete, methods=["DELETE"]),
            ],
            exception_handlers={
                ApiError: _api_error,
                HTTPException: _http_error,
                Exception: _fault,
            },
            lifespan=self._lifespan,
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        tidying = asyncio.create_task(self._tidy())
        yield
        tidying.cancel()
        await self.chat.engine.aclose()

    async def shut_down(self) -> None:
        """End every running call with an error that its client understands, and take no more."""
        self._ending = True
        for session in self.store:
            if session.calls.running:
                self.store.end(session, "session_failed")
            await session.calls.cancel(session_lost())

    async def _tidy(self) -> None:
        while True:
            await asyncio.sleep(_TIDY_S)
            try:
                await self.store.tidy()
            except OSError as error:
                log.warning("idle sessions could not be tidied: %s", error)

    def _authorise(self, request: Request) -> None:
        if self.token is None:
            return
        given = request.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {self.token}".encode()):
            raise ApiError(401, "unauthorized", "this route needs the bearer token of the run")

    async def health(self, request: Request) -> Response:
        return json_response(
            {
                "status": "ok",
                "session_server_instance_id": self.instance_id,
                "sessions": len(self.store),
                "spilled": self.store.spilled,
                "running": sum(len(session.calls.running) for session in self.store),
            }
        )

    async def engines(self, request: Request) -> Response:
        """Replace the list of engines; calls that wait for one go on."""
        self._authorise(request)
        try:
            wanted = EngineList.model_validate_json(await _body(request))
        except ValidationError as error:
            raise ApiError(400, "invalid_value", str(error)) from error
        self.chat.engine.engines.replace(wanted)
        return Response(status_code=204)

    async def create(self, request: Request) -> Response:
        self._authorise(request)
        try:
            wanted = SessionRequest.model_validate_json(await _body(request))
        except ValidationError as error:
            raise ApiError(400, "invalid_value", str(error)) from error
        session = self.store.open(wanted)
        created = SessionCreated(
            session_id=session.session_id,
            path=f"/sessions/{session.session_id}",
            session_server_instance_id=self.instance_id,
        )
        return json_response(created.model_dump())

    async def models(self, request: Request) -> Response:
        session = await self.store.get(request.path_params["session_id"])
        return json_response({"object": "list", "data": [_card("policy", session.request)]})

    async def model(self, request: Request) -> Response:
        """Any name is the policy's: that is what a session serves."""
        session = await self.store.get(request.path_params["session_id"])
        return json_response(_card(request.path_params["model"], session.request))

    async def completions(self, request: Request) -> Response:
        session_id = request.path_params["session_id"]
        self.store.check(session_id)
        content = await _body(request)
        if self._ending:
            raise session_lost()
        try:
            chat = await self._read(content)
        except ValueError as error:
            raise ApiError(400, "invalid_value", f"the body is no JSON: {error}") from error
        # From here to the start of the call nothing is waited for: it keeps the session in memory.
        session = await self.store.get(session_id)
        call = session.calls.start(
            _key(request),
            hashlib.sha256(content).digest(),
            chat.stream,
            lambda call: self.chat.answer(session, chat, call),
        )
        return CallResponse(chat, call, lambda: self.store.unseen(session, call.rid))

    async def _read(self, content: bytes) -> ChatRequest:
        """A chat request; a long one is read in a thread. Raises `ApiError`, ValueError."""
        if len(content) > _LONG_BODY:
            body = await asyncio.to_thread(read_json, content)
            return parse_request(body, len(content))
        async with self.chat.pace.piece():
            return parse_request(read_json(content), len(content))

    async def samples(self, request: Request) -> Response:
        self._authorise(request)
        session = await self.store.get(request.path_params["session_id"])
        snapshot = Snapshot.of(session, self.store.journal(session))
        content = await asyncio.to_thread(cut_samples, snapshot)
        return Response(content, media_type="application/json")

    async def delete(self, request: Request) -> Response:
        self._authorise(request)
        await self.store.close(await self.store.get(request.path_params["session_id"]))
        return Response(status_code=204)


def _key(request: Request) -> str | None:
    """The name that a client gave its request. Raises `ApiError` for one that is too long."""
    key = request.headers.get("idempotency-key")
    if key is not None and len(key) > _LONGEST_KEY:
        text = f"an Idempotency-Key has at most {_LONGEST_KEY} characters"
        raise ApiError(400, "invalid_value", text, "Idempotency-Key")
    return key


async def _body(request: Request) -> bytes:
    """The whole body; raises `ApiError` for one that is too long, or that never came."""
    parts, length = [], 0
    try:
        async for part in request.stream():
            length += len(part)
            if length > MAX_BODY:
                raise ApiError(413, "request_too_large", f"a request has at most {MAX_BODY} bytes")
            parts.append(part)
    except ClientDisconnect as error:
        raise ApiError(400, "client_disconnected", "the client went away") from error
    return b"".join(parts)


def _card(name: str, request: SessionRequest) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "miles-flow",
        "max_model_len": request.max_seq_len,
    }


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return json_response(error.body(), status=error.status)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    text = error.detail
    if error.status_code == 404:
        text = "no such route: a session has v1/chat/completions and v1/models"
    body = ApiError(error.status_code, code, text).body()
    return json_response(body, status=error.status_code)


async def _fault(request: Request, error: Exception) -> Response:
    """A fault of the server's own; its traceback is logged by the server."""
    text = f"the session server failed: {type(error).__name__}"
    return json_response(ApiError(500, "internal_error", text).body(), status=500)
