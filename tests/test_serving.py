"""What the services share: the socket that they listen on."""

from __future__ import annotations

import asyncio
import socket

import pytest

from miles_core.serving import bind


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_answers_are_sent_without_delay(host: str) -> None:
    """asyncio sets TCP_NODELAY on what it accepts; an answer in two parts would wait for it."""
    try:
        listener = bind(host, 0)
    except Exception as error:
        if host == "::1":
            pytest.skip(f"no IPv6 here: {error}")
        raise

    async def accepted() -> int:
        option: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            ours = writer.get_extra_info("socket")
            option.set_result(ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        async with await asyncio.start_server(answer, sock=listener):
            _, writer = await asyncio.open_connection(host, listener.getsockname()[1])
            writer.close()
            async with asyncio.timeout(10):
                return await option

    assert asyncio.run(accepted()) != 0
