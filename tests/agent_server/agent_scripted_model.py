"""An OpenAI-compatible chat endpoint that answers from a script, for tests of agents."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

DONE = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


def bash(command: str) -> dict[str, Any]:
    """An answer that calls the tool `bash`."""
    call = {
        "id": f"call_{abs(hash(command)) % 10**8}",
        "type": "function",
        "function": {"name": "bash", "arguments": json.dumps({"command": command})},
    }
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def text(content: str) -> dict[str, Any]:
    """An answer without a tool call."""
    return {"role": "assistant", "content": content}


def error(status: int, code: str, message: str = "scripted") -> tuple[int, dict[str, Any]]:
    """An error answer."""
    return status, {"error": {"code": code, "message": message, "type": "invalid_request_error"}}


@dataclass(frozen=True)
class Raw:
    """An answer by bytes: header lines, and a body that may be sent several times over."""

    head: str
    body: bytes = b""
    times: int = 1

    def send(self, connection: socket.socket) -> None:
        """Send it; the connection is closed after it. Whoever reads may go away before the end."""
        with contextlib.suppress(ConnectionError):
            connection.sendall(self.head.replace("\n", "\r\n").encode() + b"\r\n\r\n")
            for _ in range(self.times):
                connection.sendall(self.body)


class ScriptedModel:
    """Answers the n-th request with the n-th entry of the script; the last entry repeats.

    An entry is a message, an `error(...)`, a `Raw`, a number of seconds to wait before the next
    entry, or a function of the request's body that returns one of these.
    """

    def __init__(self, script: list[Any]) -> None:
        self.script = list(script)
        self.requests: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.keys: list[str | None] = []
        self._lock = threading.Lock()
        model = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                length = int(self.headers["content-length"])
                body = json.loads(self.rfile.read(length))
                model.keys.append(self.headers["idempotency-key"])
                status, answer = model.answer(self.path, body)
                if isinstance(answer, Raw):
                    answer.send(self.connection)
                    self.close_connection = True
                    return
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: Any) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.02,), daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/sessions/secret-of-the-session/v1"

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any] | Raw]:
        with self._lock:
            self.requests.append(body)
            self.paths.append(path)
            entry = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        while True:
            if isinstance(entry, (int, float)):
                time.sleep(entry)
                with self._lock:
                    entry = self.script.pop(0) if len(self.script) > 1 else self.script[0]
                    if isinstance(entry, (int, float)) and len(self.script) == 1:
                        return error(500, "scripted")
            elif isinstance(entry, Callable):  # type: ignore[arg-type]
                entry = entry(body)
            else:
                break
        if isinstance(entry, tuple):
            return entry
        if isinstance(entry, Raw):
            return 200, entry
        reason = "tool_calls" if entry.get("tool_calls") else "stop"
        return 200, {
            "id": "c",
            "object": "chat.completion",
            "choices": [{"index": 0, "message": entry, "finish_reason": reason}],
            "usage": {"prompt_tokens": 10, "completion_tokens": 5},
        }

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
