"""The standard streams of a program in a sandbox, and what it wrote when it has ended."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

OUTPUT_LIMIT = 4 << 20
"""Bytes that are kept of each output stream of a command."""
DRAIN_S = 1.0
"""How long the output of a command that has ended is read on: a daemon may hold the pipe."""


END_LIMIT = 4096
"""Bytes that are kept of the end of an output."""


@dataclass
class Completed:
    """A command that has ended; 124 is the code of one that ran out of time."""

    code: int
    out: bytes = b""
    err: bytes = b""

    def problem(self) -> str:
        """The end of what it said about its failure."""
        return self.err.decode(errors="replace").strip()[-300:]


@dataclass
class Streams:
    """Our ends of the streams of one program."""

    stdin: asyncio.StreamWriter
    stdout: asyncio.StreamReader
    stderr: asyncio.StreamReader

    async def communicate(
        self,
        ended: Awaitable[int],
        data: bytes | None,
        limit: int = OUTPUT_LIMIT,
        on_line: Callable[[bytes], None] | None = None,
    ) -> Completed:
        """Write `data`, read what comes, and wait for `ended`, which gives the exit status."""
        readers = [
            asyncio.ensure_future(_read(self.stdout, out := bytearray(), limit, on_line)),
            asyncio.ensure_future(_read(self.stderr, err := bytearray(), limit, None)),
        ]
        try:
            await self._feed(data)
            code = await ended
            await asyncio.wait(readers, timeout=DRAIN_S)
            return Completed(code, bytes(out), bytes(err))
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)

    async def keep_end(self, said: bytearray) -> None:
        """Read both outputs until they are closed, and have the end of what came in `said`."""

        async def read(stream: asyncio.StreamReader) -> None:
            while chunk := await stream.read(65536):
                said.extend(chunk)
                del said[:-END_LIMIT]

        await asyncio.gather(read(self.stdout), read(self.stderr))

    async def _feed(self, data: bytes | None) -> None:
        if data is None:
            return
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.stdin.write(data)
            await self.stdin.drain()
        self.stdin.close()


@contextlib.asynccontextmanager
async def pipes(with_input: bool) -> AsyncIterator[tuple[Streams, list[int]]]:
    """Streams, and the descriptors of a program's ends of them, which the caller closes.

    Without input, the program reads an end of file at once.
    """
    (stdin, stdin_ours), (stdout_ours, stdout), (stderr_ours, stderr) = (
        os.pipe(),
        os.pipe(),
        os.pipe(),
    )
    theirs = [stdin, stdout, stderr]
    ours = [os.fdopen(stdin_ours, "wb", 0), os.fdopen(stdout_ours, "rb", 0)]
    ours.append(os.fdopen(stderr_ours, "rb", 0))
    transports: list[asyncio.BaseTransport] = []
    try:
        try:
            streams = await _connect(ours, transports)
        except BaseException:
            for descriptor in theirs:
                os.close(descriptor)
            raise
        if not with_input:
            streams.stdin.close()
        yield streams, theirs
    finally:
        for transport in transports:
            transport.close()
        for file in ours[len(transports) :]:
            file.close()


async def _connect(ours: list[io.FileIO], transports: list[asyncio.BaseTransport]) -> Streams:
    """Streams of three pipes; `transports` gets that of each that has one."""
    loop = asyncio.get_running_loop()
    stdin, protocol = await loop.connect_write_pipe(
        lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader()), ours[0]
    )
    transports.append(stdin)
    readers = []
    for file in ours[1:]:
        stream = asyncio.StreamReader()
        transport, _ = await loop.connect_read_pipe(
            functools.partial(asyncio.StreamReaderProtocol, stream), file
        )
        transports.append(transport)
        readers.append(stream)
    return Streams(asyncio.StreamWriter(stdin, protocol, None, loop), *readers)


async def _read(
    stream: asyncio.StreamReader,
    kept: bytearray,
    limit: int,
    on_line: Callable[[bytes], None] | None,
) -> None:
    """Read to the end. Give each line to `on_line`, or keep the first `limit` bytes without it."""
    line = b""
    while chunk := await stream.read(65536):
        if on_line is None:
            kept += chunk[: max(0, limit - len(kept))]
        else:
            *lines, line = (line + chunk).split(b"\n")
            for whole in lines:
                on_line(whole)
            line = line[:limit]
