"""An engine that answers `/generate` at once: the backend of `benchmarks/sessions.py`.

    python benchmarks/session_engine.py '{"output_ids": [...], "routing_row_bytes": 0}'

Prints its URL. Every answer is the same ids; a token at position p of a sequence has row p of
`routing_rows` as its routing data, so that a sample's data can be checked. HTTP is read by hand:
this process shares two cores with the server that is measured.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import json
import random
import sys
from typing import Any

import orjson

try:
    from uvloop import run
except ImportError:
    from asyncio import run

ROUTING_ROWS = 8192


@functools.cache
def routing_rows(row_bytes: int) -> bytes:
    """Routing data of `ROUTING_ROWS` positions: int32 expert ids below 128, [rows, row_bytes]."""
    source = random.Random(0)
    ids = source.choices(range(128), k=ROUTING_ROWS * row_bytes // 4)
    return b"".join(value.to_bytes(4, "little") for value in ids)


class Answers:
    """What the engine says; the same ids and log-probabilities every time."""

    def __init__(self, output_ids: list[int], routing_row_bytes: int) -> None:
        self.ids = output_ids
        self.pairs = [[-((7 * i) % 97 + 1) / 64, token, None] for i, token in enumerate(output_ids)]
        self.row_bytes = routing_row_bytes
        self.rows = routing_rows(routing_row_bytes)

    def generate(self, body: dict[str, Any]) -> bytes:
        """One answer, all rows of routing data or those from `routed_experts_start_len` on."""
        meta: dict[str, Any] = {
            "id": body["rid"],
            "finish_reason": {"type": "stop", "matched": self.ids[-1]},
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(self.ids),
            "weight_version": "1",
            "output_token_logprobs": self.pairs,
        }
        if body.get("return_routed_experts"):
            start = body.get("routed_experts_start_len") or 0
            end = len(body["input_ids"]) + len(self.ids) - 1
            rows = self.rows[start * self.row_bytes : end * self.row_bytes]
            meta["routed_experts"] = base64.b64encode(rows).decode()
        return orjson.dumps({"text": "", "output_ids": self.ids, "meta_info": meta})


class Connection(asyncio.Protocol):
    """HTTP/1.1 with bodies of a known length, one request after the other."""

    def __init__(self, answers: Answers) -> None:
        self.answers = answers
        self.buffer = bytearray()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (head := self.buffer.find(b"\r\n\r\n")) >= 0:
            lines = bytes(self.buffer[:head]).lower().split(b"\r\n")
            sizes = [line[15:] for line in lines if line.startswith(b"content-length:")]
            end = head + 4 + (int(sizes[0]) if sizes else 0)
            if len(self.buffer) < end:
                return
            body = bytes(self.buffer[head + 4 : end])
            del self.buffer[:end]
            self.answer(lines[0], body)

    def answer(self, request: bytes, body: bytes) -> None:
        said = self.answers.generate(orjson.loads(body)) if b"/generate" in request else b"{}"
        head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(said)}"
        self.transport.write(head.encode() + b"\r\n\r\n" + said)


async def main() -> None:
    settings = json.loads(sys.argv[1])
    answers = Answers(settings["output_ids"], settings["routing_row_bytes"])
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(answers), "127.0.0.1", 0, backlog=2048)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    run(main())
