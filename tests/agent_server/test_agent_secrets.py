"""No secret of the server or of a request is in a file, a log, an answer or the dashboard."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("harbor")
from agent_dashboard_helpers import Watched  # noqa: E402
from agent_scripted_model import DONE, ScriptedModel, bash, error, text  # noqa: E402
from agent_server_helpers import SECRET, make_task  # noqa: E402

pytestmark = pytest.mark.agent_env

SESSION = "secret-of-the-session"
API_KEY = "sk-marker-of-a-request"
SECRETS = {"token": SECRET, "session": SESSION, "key": API_KEY}

KEYS = {"analysis": "a", "plan": "p", "commands": [], "task_complete": True}
SOLVES = [bash("env; cat /proc/*/environ; echo 42 > answer.txt"), bash(DONE)]
WRONG = error(404, "unknown_session", f"POST /sessions/{SESSION}/v1/chat/completions: gone")
AGENTS: dict[str, tuple[str, list[Any]]] = {
    "mini": ("mini-swe-agent", SOLVES),
    "mini-refused": ("mini-swe-agent", [bash("true"), WRONG]),
    "terminus": ("terminus-2", [text(json.dumps(KEYS))]),
    "terminus-refused": ("terminus-2", [WRONG]),
    "oracle": ("oracle", []),
    "nop": ("nop", []),
    "probe": ("probe", []),
    "own": ("agent_classes:Plain", [text("env > /logs/agent/env.txt; cat /proc/1/environ")]),
    "own-setup": ("agent_classes:FailsToSetUp", [text("true")]),
    "own-crash": ("agent_classes:TellsItsAddress", [text("true")]),
    "unknown": ("no-such-agent", [text("true")]),
    "not-built": ("agent_classes:NotBuilt", [text("true")]),
}


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """A server that has run a trial of each kind of agent, and one that was refused."""
    root = tmp_path_factory.mktemp("secrets")
    make_task(
        root / "tasks", "answer", test="#!/bin/bash\nenv\necho 1 > /logs/verifier/reward.txt\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))
        made = Watched(root, root / "tasks", "--max-concurrent", "2")
    yield made
    made.stop()


@pytest.fixture(scope="module")
def answers(watched: Watched) -> dict[str, str]:
    """What the server answered, by the trial."""
    told = {}
    headers = {"authorization": f"Bearer {SECRET}"}
    for name, (agent, script) in AGENTS.items():
        model = ScriptedModel(script or [text("true")])
        body = {"instance_id": "answer", "agent_name": agent, "base_url": model.url}
        body |= {"trial_id": name, "api_key": API_KEY, "session_server_id": "s"}
        try:
            told[name] = httpx.post(
                f"{watched.url}/run", json=body, headers=headers, timeout=120
            ).text
        finally:
            model.close()
    return told


def found_in(content: bytes | str) -> list[str]:
    data = content if isinstance(content, bytes) else content.encode()
    return [name for name, secret in SECRETS.items() if secret.encode() in data]


def test_each_agent_came_to_its_end(answers: dict[str, str]) -> None:
    causes = {name: json.loads(text)["verdict"]["cause"] for name, text in answers.items()}
    assert causes["mini"] is causes["terminus"] is causes["oracle"] is causes["own"] is None
    assert causes["mini-refused"] == causes["terminus-refused"] == "session_failed"


def test_no_answer_has_a_secret(answers: dict[str, str]) -> None:
    assert {name: found_in(text) for name, text in answers.items() if found_in(text)} == {}


def test_no_file_has_a_secret(watched: Watched, answers: dict[str, str]) -> None:
    """Neither those of the trials nor the log of the server, nor the names of any."""
    files = [path for path in watched.root.rglob("*") if path.is_file() and not path.is_symlink()]
    assert len([path for path in files if path.name == "result.json"]) > len(AGENTS)
    found = {str(path): found_in(str(path)) + found_in(path.read_bytes()) for path in files}
    assert {path: names for path, names in found.items() if names} == {}


def test_the_dashboard_has_no_secret(watched: Watched, answers: dict[str, str]) -> None:
    paths = ["/api/overview", "/api/trials", "/api/tasks", "/health"]
    for path in [*paths, *(f"/api/trials/{name}" for name in AGENTS)]:
        answer = watched.ask(path)
        assert answer.status_code == 200 and found_in(answer.text) == [], path


@pytest.mark.parametrize(
    "body",
    [
        {"base_url": f"http://h:x/sessions/{SESSION}/v1"},
        {"base_url": f"http://h/ /sessions/{SESSION}/v1"},
        {"base_url": [f"/sessions/{SESSION}"]},
        {"sampling_params": {"api_key": API_KEY}},
        {"sampling_params": API_KEY},
        {"api_key": API_KEY, "max_turns": SESSION},
        {"trial_id": f"/sessions/{SESSION}/{API_KEY}", "base_url": 1},
    ],
)
def test_no_refusal_tells_what_it_was_given(watched: Watched, body: dict[str, Any]) -> None:
    headers = {"authorization": f"Bearer {SECRET}"}
    answer = httpx.post(
        f"{watched.url}/run", json={"instance_id": "answer", **body}, headers=headers
    )
    assert answer.status_code == 422 and found_in(answer.text) == []
    assert found_in((watched.root / "server.log").read_bytes()) == []
