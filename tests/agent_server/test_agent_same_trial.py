"""The same id is the same trial for an equal request alone: no other one gets its reward."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("harbor")
from agent_server_helpers import SECRET, Server, make_task  # noqa: E402

from miles_core.agent_server.protocol import TrialRequest  # noqa: E402
from miles_core.agent_server.same_trial import NOT_COMPARED, differing, digests  # noqa: E402

pytestmark = pytest.mark.agent_env

URL = "http://127.0.0.1:1/sessions/0123456789abcdef/v1"
BODY: dict[str, Any] = {
    "instance_id": "answer",
    "agent_name": "oracle",
    "base_url": URL,
    "sampling_params": {"top_p": 1.0, "stop": ["a", "b"]},
    "api_key": "a-key-that-nobody-may-read",
}
OTHERS: dict[str, Any] = {
    "instance_id": "copy-002",
    "agent_name": "nop",
    "base_url": URL.replace("0", "1"),
    "model": "openai/other",
    "sampling_params": {"top_p": 0.5},
    "max_seq_len": 7,
    "max_turns": 7,
    "session_server_id": "h:1",
    "session_server_instance_id": "another",
    "api_key": None,
    "forge": "links",
}


def put(server: Server, trial_id: str, body: dict[str, Any]) -> httpx.Response:
    headers = {"authorization": f"Bearer {SECRET}"}
    return httpx.put(
        f"{server.url}/trials/{trial_id}", json=body, headers=headers, timeout=30, trust_env=False
    )


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("same")
    make_task(root / "tasks", "answer")
    made = Server(root, root / "tasks", "--max-concurrent", "2")
    yield made
    made.stop()


def test_every_field_is_compared() -> None:
    assert set(TrialRequest.model_fields) - NOT_COMPARED <= set(OTHERS)
    known = digests("t", TrialRequest(**BODY))
    for name, value in OTHERS.items():
        asked = digests("t", TrialRequest(**{**BODY, name: value}))
        assert differing(known, asked) == [name]
    assert known.keys() == {*BODY, "model"}  # what has a value, if by default


def test_equal_requests_are_the_same_trial(own: Server) -> None:
    trial_id = uuid.uuid4().hex
    assert put(own, trial_id, BODY).status_code == 200
    same = {**dict(reversed(BODY.items())), "lease_s": 77, "deadline_s": 99, "max_turns": None}
    same["model"] = "openai/policy"
    assert put(own, trial_id, same).status_code == 200
    ended = own.call(lambda client: client.wait(trial_id, 60))
    assert ended.result.reward == 1.0
    assert put(own, trial_id, same).json()["result"]["reward"] == 1.0


def test_another_request_gets_no_answer_of_the_first(own: Server) -> None:
    trial_id = uuid.uuid4().hex
    put(own, trial_id, BODY)
    conflicts = {**OTHERS, "agent_name": "nop"}
    for when in ("running", "ended", "after a restart"):
        for name in ("instance_id", "agent_name", "api_key"):
            answer = put(own, trial_id, {**BODY, name: conflicts[name]})
            assert answer.status_code == 409, (when, answer.text)
            error = answer.json()["error"]
            assert error["code"] == "trial_conflict" and error["message"].endswith(f": {name}")
        both = put(own, trial_id, {**BODY, "agent_name": "nop", "base_url": OTHERS["base_url"]})
        assert both.json()["error"]["message"].endswith(": agent_name, base_url")
        assert own.call(lambda client: client.wait(trial_id, 60)).result.reward == 1.0
        run = {**BODY, "trial_id": trial_id, "agent_name": "nop"}
        headers = {"authorization": f"Bearer {SECRET}"}
        url = f"{own.url}/run"
        assert httpx.post(url, json=run, headers=headers, trust_env=False).status_code == 409
        if when == "ended":
            own.stop()
            own.start()
    assert put(own, trial_id, BODY).json()["result"]["reward"] == 1.0


def test_what_is_kept_has_no_secret(own: Server) -> None:
    trial_id = uuid.uuid4().hex
    put(own, trial_id, BODY)
    own.call(lambda client: client.wait(trial_id, 60))
    kept = (Path(own.trials) / trial_id / "started.json").read_text()
    assert "0123456789abcdef" not in kept and BODY["api_key"] not in kept


def test_odd_names_and_depths_are_no_fault(own: Server) -> None:
    odd = {**BODY, "näme\n\u2028": 1e308, "": {"b": 1, "a": [None]}}
    trial_id = uuid.uuid4().hex
    assert put(own, trial_id, odd).status_code == 200
    assert put(own, trial_id, odd).status_code == 200
    assert put(own, trial_id, BODY).status_code == 409
    found = set()
    headers = {"authorization": f"Bearer {SECRET}", "content-type": "application/json"}
    with httpx.Client(base_url=own.url, headers=headers, trust_env=False) as client:
        for depth in [500, *range(900, 1040, 3)]:
            body = f'{{"instance_id": "absent", "deep": {"[" * depth}{"]" * depth}}}'
            found.add(client.put(f"/trials/{uuid.uuid4().hex}", content=body).status_code)
    assert 200 in found and found <= {200, 400, 422}
