"""The client against servers that fail: never a reward that was not sent."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from miles_core.agent_server.client import AgentServerClient, AgentServerError
from miles_core.agent_server.protocol import TrialRequest, TrialResult
from miles_core.verdicts import Cause, Verdict

REQUEST = TrialRequest(instance_id="x")
RESULT = TrialResult.of("t", Verdict.graded(1.0, {"reward": 1.0})).model_dump(mode="json")


def status(state: str, result: Any = None) -> dict[str, Any]:
    return {
        "trial_id": "t",
        "state": state,
        "phase": state.replace("running", "agent"),
        "result": result,
    }


class Fake:
    """A loopback HTTP server whose answers are `answer(method, path)` -> (status, body)."""

    def __init__(self, answer: Callable[[str, str], tuple[int, Any]]) -> None:
        self.calls: list[tuple[str, str]] = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def _any(self) -> None:
                self.rfile.read(int(self.headers.get("content-length") or 0))
                path = self.path.split("?")[0]
                fake.calls.append((self.command, path))
                code, body = answer(self.command, path)
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(code)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_PUT = do_POST = do_DELETE = _any  # noqa: N815

            def log_message(self, *args: Any) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


async def run(fake: Fake, timeout_s: float = 20.0, outage_s: float = 1.0) -> TrialResult:
    async with AgentServerClient(fake.url, outage_s=outage_s) as client:
        result = await client.run("t", REQUEST, timeout_s)
    fake.close()
    return result


async def test_unknown_after_a_restart_is_started_again() -> None:
    puts = 0

    def answer(method: str, path: str) -> tuple[int, Any]:
        nonlocal puts
        if method == "PUT":
            puts += 1
            return 200, status("running")
        if puts == 1:
            return 404, {"error": {"code": "unknown_trial", "message": "?"}}
        return 200, status("ended", RESULT)

    fake = Fake(answer)
    result = await run(fake)
    assert result.reward == 1.0 and puts == 2


@pytest.mark.parametrize(
    "bad",
    [
        (500, {"error": {"code": "x", "message": "y"}}),
        (200, b"<html>"),
        (200, {"reward": 1.0}),
        (200, status("ended", None)),
        (200, status("ended", {**RESULT, "verdict": {"kind": "graded", "reward": None}})),
        (401, {"error": {"code": "unauthorized", "message": "no"}}),
    ],
)
async def test_no_answer_is_no_reward(bad: tuple[int, Any]) -> None:
    result = await run(Fake(lambda method, path: bad))
    assert result.reward is None
    assert result.verdict.cause is Cause.AGENT_SERVER_UNREACHABLE


async def test_nobody_listens() -> None:
    fake = Fake(lambda method, path: (200, {}))
    fake.close()
    async with AgentServerClient(fake.url, outage_s=0.5) as client:
        result = await client.run("t", REQUEST, 10)
    assert result.verdict.cause is Cause.AGENT_SERVER_UNREACHABLE


async def test_short_outage_is_ridden_over() -> None:
    failures = iter([500, 500])

    def answer(method: str, path: str) -> tuple[int, Any]:
        code = next(failures, 200)
        return code, status("ended", RESULT) if code == 200 else {}

    assert (await run(Fake(answer), outage_s=10)).reward == 1.0


async def test_time_up_cancels_the_trial() -> None:
    fake = Fake(lambda method, path: (200, status("running")))
    result = await run(fake, timeout_s=0.5)
    assert result.verdict.cause is Cause.TRIAL_TIMEOUT
    assert fake.calls[-1] == ("DELETE", "/trials/t")


async def test_refusals_are_errors_outside_of_run() -> None:
    fake = Fake(lambda method, path: (404, {"error": {"code": "unknown_trial", "message": "t"}}))
    async with AgentServerClient(fake.url) as client:
        with pytest.raises(AgentServerError, match="unknown_trial"):
            await client.wait("t", 0)
    fake.close()
