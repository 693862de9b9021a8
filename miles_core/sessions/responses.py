"""HTTP answers: plain JSON, and the answer of a model call, whole or as a stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from miles_core.sessions.calls import Call
from miles_core.sessions.chat_answer import StreamedAnswer
from miles_core.sessions.chat_request import ChatRequest
from miles_core.sessions.errors import ApiError


def json_response(value: Any, headers: dict[str, str] | None = None, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, headers, media_type="application/json")


class CallResponse(Response):
    """The answer of a call; the call ends when its last client goes away.

    `on_unseen` is called when that was too late: there is an answer, and nobody to have it. Raises
    `ApiError` as long as nothing has been sent.
    """

    def __init__(self, chat: ChatRequest, call: Call, on_unseen: Callable[[], None]) -> None:
        super().__init__(headers={"x-request-id": call.rid})
        self._chat = chat
        self._call = call
        self._on_unseen = on_unseen

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.create_task(_disconnected(receive))
        try:
            async with self._call.waited_for():
                if self._chat.stream:
                    await self._stream(send, gone)
                else:
                    await self._whole(scope, receive, send, gone)
        finally:
            gone.cancel()
            if not self._call.seen:
                self._on_unseen()

    async def _answered(self, gone: asyncio.Task[None]) -> bool:
        """Whether there is an answer, and the client is still there to have it."""
        await asyncio.wait({self._call.task, gone}, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(0)  # a connection that was closed by now is told as such
        self._call.seen |= self._call.task.done() and not gone.done()
        return self._call.task.done()

    async def _whole(
        self, scope: Scope, receive: Receive, send: Send, gone: asyncio.Task[None]
    ) -> None:
        if await self._answered(gone):
            whole = await self._call.result()
            headers = {"x-request-id": self._call.rid}
            await json_response(whole, headers)(scope, receive, send)

    async def _stream(self, send: Send, gone: asyncio.Task[None]) -> None:
        answer = StreamedAnswer(self._chat, self._call.rid)
        begun = False

        async def tell(events: Iterable[bytes], more: bool = True) -> None:
            nonlocal begun
            body = b"".join(events)
            if not begun:
                begun = True
                headers = [
                    (b"content-type", b"text/event-stream; charset=utf-8"),
                    (b"cache-control", b"no-cache"),
                    (b"x-request-id", self._call.rid.encode()),
                ]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                body = answer.start() + body
            await send({"type": "http.response.body", "body": body, "more_body": more})

        async for reasoning, content in self._call.progress(gone):
            await tell(answer.settled(reasoning, content))
        if not await self._answered(gone):
            return
        try:
            whole = await self._call.result()
        except ApiError as error:
            if not begun:
                raise
            await tell([answer.failure(error)], more=False)
            return
        await tell(answer.end(whole), more=False)


async def _disconnected(receive: Receive) -> None:
    """Returns when the client has closed its connection. The body has been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass
