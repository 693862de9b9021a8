"""A server with a dashboard, and trials for it to show."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

import httpx
from agent_scripted_model import ScriptedModel
from agent_server_helpers import SECRET, Server

from miles_core.agent_server.protocol import TrialRequest


def free_port() -> int:
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return place.getsockname()[1]


class Watched(Server):
    """A server with a dashboard; `get` asks the dashboard."""

    def __init__(self, root: Path, tasks: Path, *flags: str) -> None:
        self.dashboard = free_port()
        self._http = httpx.Client(timeout=30, trust_env=False)
        super().__init__(root, tasks, "--dashboard-port", str(self.dashboard), *flags)

    def ask(self, path: str, method: str = "GET", **headers: str) -> httpx.Response:
        given = {"authorization": f"Bearer {SECRET}", **headers}
        url = f"http://127.0.0.1:{self.dashboard}{path}"
        return self._http.request(method, url, headers=given)

    def get(self, path: str) -> Any:
        answer = self.ask(path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def ids(self, query: str = "") -> list[str]:
        return [trial["trial_id"] for trial in self.get(f"/api/trials?{query}")["trials"]]

    def until_loaded(self) -> None:
        end = time.monotonic() + 60
        while not self.get("/api/overview")["loaded"]:
            assert time.monotonic() < end, "the index was not loaded"
            time.sleep(0.05)


def end(server: Server, trial_id: str, task: str, agent: str, script: list | None = None) -> None:
    """One trial to its end."""
    model = ScriptedModel(script) if script else None
    try:
        request = TrialRequest(
            instance_id=task,
            agent_name=agent,
            base_url=model.url if model else None,
            sampling_params={"temperature": 0.5},
            max_turns=7,
        )
        server.call(lambda client: client.run(trial_id, request, 120.0))
    finally:
        if model:
            model.close()
