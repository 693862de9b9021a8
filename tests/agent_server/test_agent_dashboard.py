"""The dashboard of a running agent server: its routes, and what they never show."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import pytest

pytest.importorskip("harbor")
from agent_dashboard_helpers import Watched, end  # noqa: E402
from agent_scripted_model import DONE, ScriptedModel, bash, error  # noqa: E402
from agent_server_helpers import SECRET, make_task  # noqa: E402

from miles_core.agent_server.dashboard.app import PAGE  # noqa: E402
from miles_core.agent_server.protocol import TrialRequest  # noqa: E402

pytestmark = pytest.mark.agent_env

HOSTILE = '<script>alert(1)</script><img src=x onerror="alert(2)">'
SESSION = "secret-of-the-session"
TERSE = str(Path(__file__).parents[2] / "examples" / "agents" / "terse.yaml")

NO_REWARD = f"""#!/bin/bash
echo '{HOSTILE}'
echo 'the token is {SECRET}'
ln -s /etc/passwd /logs/verifier/test-stderr.txt
exit 1
"""


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """Four trials have ended, in this order: solved, missing, mini, refused."""
    root = tmp_path_factory.mktemp("dashboard")
    make_task(root / "tasks", "answer")
    make_task(root / "tasks", "no-reward", test=NO_REWARD)
    server = Watched(root, root / "tasks", *["--agent-config", TERSE, "--max-concurrent", "1"])
    try:
        end(server, "solved", "answer", "oracle")
        end(server, "missing", "no-reward", "nop")
        said = f"echo '{HOSTILE}'; echo http://h/sessions/{SESSION}/v1; echo $((40 + 2))"
        end(server, "mini", "answer", "mini-swe-agent", [bash(said), bash(DONE)])
        refusal = error(503, "engine_failed", f"POST /sessions/{SESSION}/v1/chat/completions")
        end(server, "refused", "answer", "mini-swe-agent", [refusal])
        yield server
    finally:
        server.stop()


def test_overview_counts_trials_by_verdict_and_minute(watched: Watched) -> None:
    watched.until_loaded()
    found = watched.get("/api/overview")
    assert (found["running"], found["queued"], found["ended"]) == (0, 0, 4)
    counts = {(one["kind"], one["cause"]): one["count"] for one in found["verdicts"]}
    assert counts == {
        ("graded", None): 2,
        ("no_verdict", "reward_missing"): 1,
        ("no_verdict", "engine_failed"): 1,
    }
    assert sum(minute["ended"] for minute in found["minutes"]) == 4
    assert sum(minute["reward_sum"] for minute in found["minutes"]) == 1.0
    server = found["server"]
    assert (server["capacity"], server["sandbox"], server["status"]) == (1, "bubblewrap", "ready")
    assert 0 < server["started_at"] <= time.time()


def test_list_is_newest_first_filtered_and_paged(watched: Watched) -> None:
    everything = ["refused", "mini", "missing", "solved"]
    assert watched.ids() == everything
    assert watched.ids("limit=2") == everything[:2]
    assert watched.ids("limit=2&offset=3") == everything[3:]
    assert watched.get("/api/trials?limit=1&offset=9")["total"] == 4
    assert watched.ids("cause=reward_missing") == ["missing"]
    assert watched.ids("kind=no_verdict") == ["refused", "missing"]
    assert watched.ids("state=ended&kind=graded&task=ANSW") == ["mini", "solved"]
    assert watched.ids("task=no-rew") == ["missing"]
    assert watched.ids("state=running") == [] == watched.ids("phase=agent")
    row = watched.get("/api/trials?task=mini")["trials"][0]
    assert (row["state"], row["task"], row["agent"], row["turns"], row["reward"]) == (
        *("ended", "answer", "mini-swe-agent", 2, 0.0),
    )
    assert row["created_at"] < row["ended_at"]
    wrong = ("state=over", "cause=bad_luck", "limit=201", "offset=-1", "stat=ended", "limit=1e999")
    for query in (*wrong, "offset=NaN", f"offset={10**30}", "task=" + "x" * 201, "limit="):
        answer = watched.ask(f"/api/trials?{query}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (422, "invalid_request")
    assert watched.ids("task=%ff%00%ed%a0%80") == []


def test_tasks_are_counted(watched: Watched) -> None:
    found = watched.get("/api/tasks")
    assert found["total"] == 2
    answer = next(task for task in found["tasks"] if task["task"] == "answer")
    assert (answer["ended"], answer["scored"], answer["reward_sum"]) == (3, 2, 1.0)
    assert watched.get("/api/tasks?task=no-")["tasks"][0]["no_verdict"] == 1


def test_one_trial_in_full(watched: Watched) -> None:
    found = watched.get("/api/trials/mini")
    assert found["request"]["max_turns"] == 7
    assert found["request"]["sampling_params"] == {"temperature": 0.5}
    assert "base_url" not in found["request"]
    assert (found["verdict"]["kind"], found["verdict"]["reward"]) == ("graded", 0.0)
    seconds = {phase["name"]: phase["seconds"] for phase in found["phases"]}
    assert seconds["agent"] > 0 and seconds["verifier"] > 0
    trajectory = found["trajectories"][0]
    assert trajectory["format"] == "mini-swe-agent" and trajectory["first"] == 0
    turn = next(turn for turn in trajectory["turns"] if turn["role"] == "assistant")
    assert turn["calls"][0]["name"] == "bash" and "$((40 + 2))" in turn["calls"][0]["command"]
    assert "42" in turn["calls"][0]["output"]
    assert (turn["tokens_in"], turn["tokens_out"]) == (10, 5)


def test_hostile_text_stays_text(watched: Watched) -> None:
    answer = watched.ask("/api/trials/missing")
    assert answer.headers["content-type"] == "application/json"
    outputs = answer.json()["outputs"]["verifier"]
    assert [output["name"] for output in outputs] == ["test-stdout.txt"]  # the link is not read
    assert HOSTILE in outputs[0]["text"]
    command = watched.get("/api/trials/mini")["trajectories"][0]["turns"][2]["calls"][0]
    assert HOSTILE in command["command"] and HOSTILE in command["output"]
    folder = resources.files("miles_core.agent_server.dashboard").joinpath("page")
    for name in PAGE:
        text = folder.joinpath(name).read_text()
        markup = r"innerHTML|outerHTML|insertAdjacent|document\.write|DOMParser|eval\(|\bon\w+="
        assert not re.search(markup, text), name
        assert not re.search(r"(?:src|href|import|url)\W{1,3}(?:https?:)?//", text), name


def test_no_secret_in_any_answer(watched: Watched) -> None:
    paths = ["/", "/api/overview", "/api/trials", "/api/tasks", "/health"]
    paths += [f"/api/trials/{name}" for name in watched.ids()]
    for path in paths:
        answer = watched.ask(path)
        assert answer.status_code == 200
        assert SECRET not in answer.text and SESSION not in answer.text, path
    assert "[hidden]" in watched.ask("/api/trials/missing").text
    assert "/sessions/[hidden]/v1" in watched.ask("/api/trials/mini").text


def test_data_need_the_token_and_the_page_does_not(watched: Watched) -> None:
    for path in ("/api/overview", "/api/trials", "/api/tasks", "/api/trials/mini"):
        for wrong in ("", "Bearer wrong", SECRET):
            answer = watched.ask(path, authorization=wrong)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "unauthorized"
    for name in PAGE:
        answer = watched.ask("/" if name == "index.html" else f"/{name}", authorization="")
        assert answer.status_code == 200 and len(answer.content) > 500


def test_every_answer_forbids_foreign_and_inline_script(watched: Watched) -> None:
    for path in ("/", "/dashboard.js", "/api/overview", "/api/trials/none", "/none"):
        policy = watched.ask(path).headers["content-security-policy"]
        assert "default-src 'none'" in policy and "script-src 'self';" in policy
        assert "unsafe" not in policy and "frame-ancestors 'none'" in policy
        assert watched.ask(path).headers["x-content-type-options"] == "nosniff"
    assert not re.search(r"<script(?![^>]*src=)|<style|style=", watched.ask("/").text)


def test_what_has_not_changed_is_not_sent_again(watched: Watched) -> None:
    paths = ["/", "/panel.js", "/api/overview", "/api/trials?limit=2", "/api/trials/mini"]
    tags = {path: watched.ask(path).headers["etag"] for path in paths}
    for path, tag in tags.items():
        again = watched.ask(path, **{"if-none-match": f'"other", W/{tag}'})
        assert (again.status_code, again.content) == (304, b"")
        assert watched.ask(path, **{"if-none-match": '"other"'}).status_code == 200
    assert len(set(tags.values())) == len(tags)


def test_only_get(watched: Watched) -> None:
    for path in ("/", "/api/overview", "/api/trials", "/api/trials/mini", "/health"):
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            assert watched.ask(path, method).status_code == 405, (method, path)
    assert watched.ask("/flush", "POST").status_code == 404


def test_ids_that_are_none_are_refused(watched: Watched) -> None:
    assert watched.ask("/api/trials/none").json()["error"]["code"] == "unknown_trial"
    for path in (
        "..%2f..%2fetc%2fpasswd",
        "%2e%2e",
        ".base",
        "mini%00",
        "mini%2f..%2fsolved",
        "a b",
    ):
        assert watched.ask(f"/api/trials/{path}").status_code in (404, 422), path
    for path in ("/../app.py", "/page/index.html", "/%2e%2e/app.py", "/index.html", "/docs"):
        assert watched.ask(path).status_code == 404, path


def test_running_and_queued_trials_are_first(watched: Watched) -> None:
    model = ScriptedModel([bash("echo first turn"), 30.0, bash(DONE)])
    mini = TrialRequest(instance_id="answer", base_url=model.url)
    nop = TrialRequest(instance_id="no-reward", agent_name="nop")
    before = watched.ask("/api/overview").headers["etag"]
    try:
        watched.call(lambda client: client.start("slow", mini))
        watched.call(lambda client: client.start("waiting", nop))
        limit = time.monotonic() + 60
        while not watched.get("/api/trials?state=running")["trials"][0]["turns"]:
            assert time.monotonic() < limit, "the agent took no turn"
            time.sleep(0.05)
        running, queued = watched.get("/api/trials?limit=2")["trials"]
        assert (running["trial_id"], running["state"], running["phase"]) == (
            *("slow", "running", "agent"),
        )
        assert running["created_at"] <= running["phase_began_at"] <= time.time()
        assert (queued["trial_id"], queued["state"], queued["reward"]) == (
            "waiting",
            "queued",
            None,
        )
        assert watched.ids("state=queued") == ["waiting"] and watched.ids("phase=agent") == ["slow"]
        assert watched.ids("state=ended")[0] == "refused"
        overview = watched.ask("/api/overview")
        assert overview.headers["etag"] != before
        assert (overview.json()["running"], overview.json()["queued"]) == (1, 1)
        assert overview.json()["phases"] == {"agent": 1}
        found = watched.get("/api/trials/slow")
        assert found["verdict"] is None and found["phases"] == []
        assert "base_url" not in found["request"] and SESSION not in json.dumps(found)
    finally:
        for name in ("slow", "waiting"):
            watched.call(lambda client, name=name: client.cancel(name))
        model.close()
    assert set(watched.ids("cause=cancelled")) == {"slow", "waiting"}


def test_the_index_is_rebuilt_after_a_restart(watched: Watched) -> None:
    watched.until_loaded()
    before = watched.get("/api/trials")
    watched.stop()
    watched.start()
    watched.until_loaded()
    after = watched.get("/api/trials")
    assert after["total"] == before["total"] >= 4
    for old, new in zip(before["trials"], after["trials"], strict=True):
        for name in ("trial_id", "task", "agent", "kind", "cause", "reward", "turns", "seconds"):
            assert old[name] == new[name]
        assert abs(old["ended_at"] - new["ended_at"]) < 1
        assert abs(old["created_at"] - new["created_at"]) < 1
    assert watched.get("/api/trials/mini")["request"]["max_turns"] == 7


def test_a_trial_that_is_no_longer_kept_leaves_the_list(tmp_path: Path, tasks: Path) -> None:
    server = Watched(tmp_path, tasks, "--keep-trials", "2", "--max-concurrent", "1")
    try:
        server.until_loaded()
        for name in ("one", "two", "three"):
            end(server, name, "answer", "nop")
        assert server.ids() == ["three", "two", "one"]
        server.stop()
        for age, name in enumerate(("three", "two", "one"), 1):  # for a client may miss none
            past = time.time() - 3600 * age
            os.utime(server.trials / name / "result.json", (past, past))
        server.start()
        server.until_loaded()
        assert server.ids() == ["three", "two"]
        end(server, "four", "answer", "nop")
        assert server.ids() == ["four", "three"]
        assert server.get("/api/overview")["ended"] == 2
        assert server.get("/api/tasks")["tasks"][0]["ended"] == 2
        for name in ("one", "two"):
            assert server.ask(f"/api/trials/{name}").status_code == 404
    finally:
        server.stop()
