"""The session server's routes."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import uuid
from collections.abc import AsyncIterator
from typing import Any

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from miles_core.sessions.chat import ChatService, session_gone
from miles_core.sessions.openai_api import ApiError, parse_request, stream_events
from miles_core.sessions.protocol import SessionCreated, SessionRequest
from miles_core.sessions.samples import cut_samples
from miles_core.sessions.session import Session


class SessionApp:
    """All sessions of one server process. `token` guards the control routes when given."""

    def __init__(self, chat: ChatService, token: str | None) -> None:
        self.chat = chat
        self.token = token
        self.instance_id = str(uuid.uuid4())
        self.sessions: dict[str, Session] = {}

    def starlette(self) -> Starlette:
        one = "/sessions/{session_id}"
        return Starlette(
            routes=[
                Route("/health", self.health),
                Route("/sessions", self.create, methods=["POST"]),
                Route(f"{one}/v1/chat/completions", self.completions, methods=["POST"]),
                Route(f"{one}/v1/models", self.models),
                Route(f"{one}/samples", self.samples),
                Route(one, self.delete, methods=["DELETE"]),
            ],
            exception_handlers={ApiError: _api_error, HTTPException: _http_error},
            lifespan=self._lifespan,
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        yield
        for session in list(self.sessions.values()):
            await self._close(session)
        await self.chat.engine.aclose()

    def _authorise(self, request: Request) -> None:
        if self.token is None:
            return
        given = request.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {self.token}".encode()):
            raise ApiError(401, "unauthorized", "this route needs the bearer token of the run")

    def _session(self, request: Request) -> Session:
        session = self.sessions.get(request.path_params["session_id"])
        if session is None:
            raise session_gone()
        return session

    async def health(self, request: Request) -> Response:
        return JSONResponse(
            {
                "status": "ok",
                "session_server_instance_id": self.instance_id,
                "sessions": len(self.sessions),
            }
        )

    async def create(self, request: Request) -> Response:
        self._authorise(request)
        try:
            wanted = SessionRequest.model_validate_json(await request.body())
        except ValidationError as error:
            raise ApiError(400, "invalid_value", str(error)) from error
        session = Session(wanted)
        self.sessions[session.session_id] = session
        created = SessionCreated(
            session_id=session.session_id,
            path=f"/sessions/{session.session_id}",
            session_server_instance_id=self.instance_id,
        )
        return JSONResponse(created.model_dump())

    async def models(self, request: Request) -> Response:
        session = self._session(request)
        model = {
            "id": "policy",
            "object": "model",
            "owned_by": "miles-flow",
            "max_model_len": session.request.max_seq_len,
        }
        return JSONResponse({"object": "list", "data": [model]})

    async def completions(self, request: Request) -> Response:
        session = self._session(request)
        try:
            body = json.loads(await request.body())
        except (ValueError, RecursionError) as error:
            raise ApiError(400, "invalid_value", f"the body is no JSON: {error}") from error
        chat = parse_request(body)
        task = asyncio.create_task(self.chat.answer(session, chat))
        session.running.add(task)
        gone = asyncio.create_task(_disconnected(request))
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                task.cancel()
            whole = await task
        except asyncio.CancelledError:
            # Either the client went away or the session was deleted.
            task.cancel()
            raise session_gone() from None
        finally:
            gone.cancel()
            session.running.discard(task)
        if chat.stream:
            events = stream_events(whole, chat.include_usage)
            return StreamingResponse(events, media_type="text/event-stream")
        return JSONResponse(whole)

    async def samples(self, request: Request) -> Response:
        self._authorise(request)
        session = self._session(request)
        content = await asyncio.to_thread(lambda: cut_samples(session).model_dump_json())
        return Response(content, media_type="application/json")

    async def delete(self, request: Request) -> Response:
        self._authorise(request)
        session = self._session(request)
        del self.sessions[session.session_id]
        await self._close(session)
        return Response(status_code=204)

    @staticmethod
    async def _close(session: Session) -> None:
        """End a session and what runs in it; every call ends, cancelled or not."""
        session.closed = True
        running = list(session.running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    """Returns when the client has closed its connection. The body has been read before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body(), status_code=error.status)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    body: dict[str, Any] = ApiError(error.status_code, code, error.detail).body()
    return JSONResponse(body, status_code=error.status_code)
