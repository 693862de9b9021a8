"""What is seen of a trial while it runs: its phase, and the turns of its agent so far."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("harbor")
from agent_dashboard_helpers import Watched  # noqa: E402
from agent_scripted_model import DONE, ScriptedModel, bash, text  # noqa: E402
from agent_server_helpers import make_task  # noqa: E402

from miles_core.agent_server.agents.job import MOST_MESSAGES, Conversation  # noqa: E402
from miles_core.agent_server.dashboard.clean import Cleaner  # noqa: E402
from miles_core.agent_server.dashboard.trajectory import Live, live_trajectory  # noqa: E402
from miles_core.agent_server.protocol import TrialRequest  # noqa: E402

pytestmark = pytest.mark.agent_env

SESSION = "secret-of-the-session"
TERSE = str(Path(__file__).parents[2] / "examples" / "agents" / "terse.yaml")
STEPS = """schema_version = "1.4"
[environment]
network_mode = "no-network"
workdir = "/app"
[[steps]]
name = "one"
[[steps]]
name = "two"
"""


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    root = tmp_path_factory.mktemp("live")
    make_task(root / "tasks", "answer")
    task = make_task(root / "tasks", "steps", toml=STEPS)
    for name in ("one", "two"):
        for path in ("tests/test.sh", "instruction.md"):
            file = task / "steps" / name / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes((task / path).read_bytes())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))
        made = Watched(root, root / "tasks", "--agent-config", TERSE, "--max-concurrent", "2")
    yield made
    made.stop()


class Held:
    """A model whose answers of the kind `hold` wait until they are let go."""

    def __init__(self, make: Callable[[Held], list[Any]]) -> None:
        self._gates = threading.Semaphore(0)
        self.model = ScriptedModel(make(self))

    def hold(self, answer: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
        def wait(body: dict[str, Any]) -> dict[str, Any]:
            assert self._gates.acquire(timeout=60)
            return answer

        return wait

    def let_go(self, times: int = 1) -> None:
        self._gates.release(times)


def start(server: Watched, trial_id: str, agent: str, held: Held, task: str = "answer") -> None:
    request = TrialRequest(instance_id=task, agent_name=agent, base_url=held.model.url)
    server.call(lambda client: client.start(trial_id, request))


def ended(server: Watched, trial_id: str) -> Any:
    status = server.call(lambda client: client.wait(trial_id, 60.0))
    assert status.state == "ended"
    return status.result


def until(server: Watched, trial_id: str, holds: Callable[[dict[str, Any]], bool]) -> dict:
    """The trial's answer of the dashboard once a condition holds."""
    end = time.monotonic() + 60
    while True:
        found = server.get(f"/api/trials/{trial_id}")
        assert found["trial"]["state"] != "ended", found["verdict"]
        if holds(found):
            return found
        assert time.monotonic() < end, json.dumps(found)[:2000]
        time.sleep(0.05)


def says(word: str) -> Callable[[dict[str, Any]], bool]:
    return lambda found: word in json.dumps(found["trajectories"])


def test_the_turns_of_mini_swe_agent_are_seen_as_they_come(watched: Watched) -> None:
    said = f"echo first-$((40 + 2)) http://h/sessions/{SESSION}/v1"
    held = Held(lambda h: [bash(said), h.hold(text("second answer")), h.hold(bash(DONE))])
    try:
        start(watched, "mini", "mini-swe-agent", held)
        found = until(watched, "mini", says("first-42"))
        (shown,) = found["trajectories"]
        assert (shown["format"], shown["first"], shown["problem"]) == ("live", 0, None)
        assert [turn["role"] for turn in shown["turns"]] == ["system", "user", "assistant"]
        first = shown["turns"][2]
        assert (first["tokens_in"], first["finish_reason"]) == (10, "tool_calls")
        assert "first-42" in first["calls"][0]["output"] and first["time"] <= time.time()
        assert SESSION not in json.dumps(found) and "[hidden]" in json.dumps(found)
        tag = watched.ask("/api/trials/mini").headers["etag"]
        same = watched.ask("/api/trials/mini", **{"if-none-match": tag})
        assert (found["trial"]["phase"], same.status_code) == ("agent", 304)
        held.let_go()
        until(watched, "mini", says("second answer"))
        assert watched.ask("/api/trials/mini", **{"if-none-match": tag}).status_code == 200
        held.let_go()
        assert ended(watched, "mini").agent_metrics.turns == 3
    finally:
        held.model.close()
    (whole,) = watched.get("/api/trials/mini")["trajectories"]
    assert whole["format"] == "mini-swe-agent"
    assert whole["turns"][: len(shown["turns"])] == shown["turns"]


def test_each_step_of_a_task_is_seen_in_its_turn(watched: Watched) -> None:
    held = Held(
        lambda h: [bash("echo of-one"), bash(DONE), bash("echo of-two"), h.hold(bash(DONE))]
    )
    try:
        start(watched, "steps", "mini-swe-agent", held, "steps")
        found = until(watched, "steps", says("of-two"))
        formats = [(one["step"], one["format"]) for one in found["trajectories"]]
        assert formats == [("one", "mini-swe-agent"), (None, "live")]
        assert "of-one" not in json.dumps(found["trajectories"][1])
        held.let_go()
        ended(watched, "steps")
    finally:
        held.model.close()
    steps = [one["step"] for one in watched.get("/api/trials/steps")["trajectories"]]
    assert steps == ["one", "two"]


def test_the_turns_of_terminus_2_are_seen_as_they_come(watched: Watched) -> None:
    def keys(line: str, done: bool = False) -> dict[str, Any]:
        commands = [{"keystrokes": f"{line}\n", "duration": 0.1}]
        made = {"analysis": "a", "plan": "p", "commands": commands, "task_complete": done}
        return text(json.dumps(made))

    held = Held(lambda h: [keys("echo seen-$((40 + 2))"), *[h.hold(keys("true", True))] * 2])
    try:
        start(watched, "terminus", "terminus-2", held)
        found = until(watched, "terminus", says("seen-42"))
        (shown,) = found["trajectories"]
        assert shown["format"] == "ATIF" and found["trial"]["turns"] == 1
        assert SESSION not in json.dumps(found)
        held.let_go(2)
        ended(watched, "terminus")
    finally:
        held.model.close()
    (whole,) = watched.get("/api/trials/terminus")["trajectories"]
    assert whole["format"] == "ATIF" and len(whole["turns"]) > len(shown["turns"])


def test_the_set_up_of_an_agent_is_a_phase_of_its_own(watched: Watched) -> None:
    held = Held(lambda h: [text("true")])
    try:
        start(watched, "slow", "agent_classes:SlowToSetUp", held)
        found = until(watched, "slow", lambda found: found["trial"]["phase"] == "agent_setup")
        assert found["trial"]["phase_began_at"] <= time.time()
        assert watched.get("/api/overview")["phases"] == {"agent_setup": 1}
        assert watched.ids("phase=agent_setup") == ["slow"]
        status = watched.call(lambda client: client.wait("slow", 0.0))
        assert (status.state, status.phase) == ("running", "agent_setup")
        time.sleep(0.3)
        (watched.trials / "slow" / "harbor" / "slow" / "agent" / "go").touch()
        metrics = ended(watched, "slow").agent_metrics
    finally:
        held.model.close()
    assert metrics.agent_setup_time >= 0.3
    seconds = {one["name"]: one["seconds"] for one in watched.get("/api/trials/slow")["phases"]}
    assert seconds["agent_setup"] == pytest.approx(metrics.agent_setup_time, abs=0.01)


def test_of_a_long_conversation_the_last_messages_are_kept() -> None:
    talk = Conversation()
    for number in range(MOST_MESSAGES + 7):
        talk.add(number, {"role": "user", "content": str(number)}, 30)
    assert (talk.runs, talk.count, len(talk.messages())) == (1, MOST_MESSAGES + 7, MOST_MESSAGES)
    talk.add(talk.count, {"role": "user", "content": "long"}, 3 << 20)
    assert talk.messages() == []
    talk.add(talk.count, {"role": "user", "content": "last"}, 30)
    shown = live_trajectory(Live(1, talk.count, talk.messages()), Cleaner())
    assert (shown["first"], [turn["text"] for turn in shown["turns"]]) == (
        *(MOST_MESSAGES + 8, ["last"]),
    )
    talk.add(0, {"role": "system", "content": "again"}, 30)
    assert (talk.runs, talk.count, len(talk.messages())) == (2, 1, 1)
