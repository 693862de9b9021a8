"""A bound on the size of requests, kept while they arrive."""

from __future__ import annotations

import contextlib

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from miles_core.agent_server.answers import error_answer


class _TooLarge(Exception):
    """More came than a request may have."""


class BodyLimit:
    """ASGI middleware: a request of more than `limit` bytes is answered with 413."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        seen = int(declared) if declared.isdigit() else 0
        if seen > self._limit:
            await self._refuse(scope, receive, send)
            return
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._limit:
                raise _TooLarge
            return message

        async def unless_too_large(message: Message) -> None:
            if seen <= self._limit:  # else the application answers to the error above
                await send(message)

        with contextlib.suppress(_TooLarge):
            await self._app(scope, counted, unless_too_large)
        if seen > self._limit:
            await self._refuse(scope, receive, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        message = f"a request may have {self._limit} bytes"
        await error_answer(413, "request_too_large", message)(scope, receive, send)
