"""The dashboard's parts that need no server: index, files, texts, trajectories."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from miles_core.agent_server.dashboard.clean import Cleaner
from miles_core.agent_server.dashboard.files import Folder
from miles_core.agent_server.dashboard.index import EndedTrial, TrialIndex, read_all
from miles_core.agent_server.dashboard.trajectory import MOST_TURNS, read_trajectory

NOW = time.time()


def ended(name: str, **fields) -> EndedTrial:
    values = {"task": "t", "agent": "nop", "kind": "graded", "cause": None, "reward": 1.0}
    values |= {"turns": None, "seconds": 1.0, "created_at": NOW, "ended_at": NOW}
    return EndedTrial(trial_id=name, **{**values, **fields})


def write_trial(root: Path, name: str, age_s: float, verdict: dict, task: str = "answer") -> None:
    (root / name).mkdir(parents=True)
    started = {"instance_id": task, "agent_name": "nop", "created_at": NOW - age_s - 1}
    (root / name / "started.json").write_text(json.dumps(started))
    result = {"verdict": verdict, "agent_metrics": {"turns": 3, "total_time": 0.5}}
    (root / name / "result.json").write_text(json.dumps(result))
    os.utime(root / name / "result.json", (NOW - age_s, NOW - age_s))


GRADED = {"kind": "graded", "reward": 0.5, "cause": None}
MISSING = {"kind": "no_verdict", "reward": None, "cause": "reward_missing"}


def test_index_of_a_directory_is_ordered_counted_and_bounded(tmp_path: Path) -> None:
    write_trial(tmp_path, "old", 7200, GRADED)
    write_trial(tmp_path, "new", 5, GRADED)
    write_trial(tmp_path, "middle", 60, MISSING)
    (tmp_path / "running").mkdir()
    (tmp_path / "running" / "started.json").write_text("{}")
    (tmp_path / ".base").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "result.json").write_text("{")
    index = read_all(tmp_path, 10)
    assert [trial.trial_id for trial in index.newest_first()] == ["new", "middle", "old"]
    assert index.verdicts == {("graded", None): 2, ("no_verdict", "reward_missing"): 1}
    assert sum(minute.ended for minute in index.minutes.values()) == 2
    one = index.get("new")
    assert one is not None and (one.task, one.turns, one.reward) == ("answer", 3, 0.5)
    newest = read_all(tmp_path, 2)
    assert newest.left_out == 2 and len(newest) == 1  # `broken` is the newest, and none of ours


def test_index_counts_follow_what_is_added_and_what_falls_out() -> None:
    index = TrialIndex(Path("nowhere"), most=2)
    index.add(ended("a", task="one"))
    index.add(ended("b", task="two", kind="no_verdict", cause="cancelled", reward=None))
    index.add(ended("b", task="two", kind="graded", reward=0.0))
    index.add(ended("c", task="two"))
    assert [trial.trial_id for trial in index.newest_first()] == ["c", "b"]
    assert index.left_out == 1 and set(index.tasks) == {"two"}
    assert +index.verdicts == {("graded", None): 2}
    two = index.tasks["two"]
    assert (two.ended, two.scored, two.reward_sum, two.no_verdict) == (2, 2, 1.0, 0)


async def test_trials_that_end_while_the_index_is_read_are_in_it_once(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_trial(tmp_path, name, 5, GRADED)
    index = TrialIndex(tmp_path)
    index.load()
    index.load()
    index.add(ended("b"))
    index.add(ended("c"))
    assert index._loading is not None
    await index._loading
    assert index.loaded and [t.trial_id for t in index.newest_first()] == ["c", "b", "a"]
    assert +index.verdicts == {("graded", None): 3}


def test_a_removed_trial_is_in_no_count_but_that_of_the_last_hour() -> None:
    index = TrialIndex(Path("nowhere"), most=2)
    for name in ("a", "b", "c"):
        index.add(ended(name, task=name))
    assert index.left_out == 1
    for name in ("c", "c", "never"):
        index.remove(name)
    assert [trial.trial_id for trial in index.newest_first()] == ["b"]
    assert +index.verdicts == {("graded", None): 1} and set(index.tasks) == {"b"}
    assert index.left_out == 0  # one that was left out, and is gone
    assert sum(minute.ended for minute in index.minutes.values()) == 3


async def test_a_trial_that_is_removed_while_the_index_is_read_is_not_in_it(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_trial(tmp_path, name, 5, GRADED)
    index = TrialIndex(tmp_path)
    index.remove("b")  # nothing is being read yet, so the disk tells
    index.load()
    index.remove("a")
    assert index._loading is not None
    await index._loading
    assert [trial.trial_id for trial in index.newest_first()] == ["b"]
    assert set(index.tasks) == {"answer"} and index.tasks["answer"].ended == 1


def test_nothing_is_read_through_links_or_from_what_is_no_file(tmp_path: Path) -> None:
    root, outside = tmp_path / "trial", tmp_path / "outside"
    (root / "agent").mkdir(parents=True)
    outside.mkdir()
    (outside / "secret.txt").write_text("secret")
    (root / "agent" / "link.txt").symlink_to(outside / "secret.txt")
    (root / "linked").symlink_to(outside)
    os.mkfifo(root / "agent" / "pipe.txt")
    (root / "agent" / "real.txt").write_text("one\ntwo\nthree\n")
    folder = Folder(root)
    for path in [("agent", "link.txt"), ("linked", "secret.txt"), ("agent", "pipe.txt")]:
        assert folder.tail(*path, limit=100) is None and folder.stamp(*path) is None
    for path in [("..", "outside", "secret.txt"), ("agent/../../outside", "secret.txt")]:
        assert folder.tail(*path, limit=100) is None
    assert folder.names("linked") == []
    found = folder.tail("agent", "real.txt", limit=7)
    assert found is not None and (found.text, found.size, found.cut) == ("three\n", 14, True)
    assert folder.read("agent", "real.txt", limit=7, whole=True) is None


def test_secrets_and_controls_are_taken_out_of_texts() -> None:
    cleaner = Cleaner(["token-of-the-tests", None, ""])
    text = (
        "http://h:1/sessions/0123abcd/v1 Bearer abcdef123 token-of-the-tests \x1b[31mred\x1b[0m\0"
    )
    cleaned = cleaner.text(text)
    assert cleaned == "http://h:1/sessions/[hidden]/v1 Bearer [hidden] [hidden] red\ufffd"
    assert cleaner.text("<b>&amp;</b>") == "<b>&amp;</b>"
    value = cleaner.value({"api_key": "k", "max_tokens": 5, "deep": [float("nan"), "\ud800"]})
    assert value == {"api_key": "[hidden]", "max_tokens": 5, "deep": ["nan", "\ufffd"]}
    long = cleaner.short("a" * 900 + "z" * 900, 400)
    assert long.startswith("a" * 300) and long.endswith("z" * 100) and "[1400 characters" in long


def test_a_trajectory_of_harbors_format(tmp_path: Path) -> None:
    steps = [
        {"step_id": 1, "source": "user", "message": "do it"},
        {
            "step_id": 2,
            "source": "agent",
            "message": [{"type": "text", "text": "I will"}, {"type": "image"}],
            "reasoning_content": "hm",
            "timestamp": "2026-01-01T00:00:00Z",
            "tool_calls": [
                {"tool_call_id": "x", "function_name": "bash", "arguments": {"command": "ls"}},
                {"tool_call_id": "y", "function_name": "put", "arguments": {"n": 1}},
            ],
            "observation": {
                "results": [{"source_call_id": "x", "content": "out"}, {"content": "more"}]
            },
            "metrics": {"prompt_tokens": 7, "completion_tokens": 2},
        },
        "no step",
    ]
    path = tmp_path / "agent" / "trajectory.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"schema_version": "ATIF-v1.8", "steps": steps}))
    found = read_trajectory(Folder(tmp_path), ("agent",), Cleaner())
    assert found["format"] == "ATIF" and len(found["turns"]) == 2
    assert found["turns"][1] == {
        "role": "assistant",
        "text": "I will\n[image]",
        "reasoning": "hm",
        "calls": [
            {"name": "bash", "command": "ls", "output": "out"},
            {"name": "put", "command": '{"n": 1}', "output": "more"},
        ],
        "tokens_in": 7,
        "tokens_out": 2,
        "time": 1767225600.0,
    }


@pytest.mark.parametrize("content", ["{", "[]", "[" * 100_000, '{"messages": 5}', '{"steps": {}}'])
def test_what_is_no_trajectory_is_said_to_be_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent" / "trajectory.json").write_text(content)
    found = read_trajectory(Folder(tmp_path), ("agent",), Cleaner())
    assert found["format"] is None and "no trajectory that can be read" in found["problem"]


def test_of_a_long_trajectory_the_last_turns_are_given(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": str(n)} for n in range(MOST_TURNS + 5)]
    (tmp_path / "agent").mkdir()
    path = tmp_path / "agent" / "mini-swe-agent.trajectory.json"
    path.write_text(json.dumps({"messages": [*messages, {"role": None}, {}, 3]}))
    found = read_trajectory(Folder(tmp_path), ("agent",), Cleaner())
    assert found["first"] == 7 and len(found["turns"]) == MOST_TURNS
    assert found["turns"][0]["text"] == "7" and found["turns"][-1]["role"] == "None"
