"""Where a request belongs: equal messages in other words, and unequal ones that look alike."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_core.sessions.messages import parse_message
from miles_core.sessions.tree import Tree, Turn

USER = {"role": "user", "content": "a"}


def call(arguments: Any, **more: Any) -> dict[str, Any]:
    function = {"name": "bash", "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"function": function}], **more}


def turn_of(*sent: dict[str, Any]) -> Turn:
    """A turn whose messages are as they were sent."""
    *new, answer = (parse_message(raw, "") for raw in sent)
    none = np.zeros(0, np.int32)
    return Turn(0, None, "", tuple(new), answer, none, none, none, 0, "", (), "stop", 0, 1)


@pytest.mark.parametrize(
    ("mine", "theirs", "same"),
    [
        (call({"n": 1}), call({"n": 1}), True),
        (call({"n": 1}), call({"n": True}), False),
        (call({"n": 1}), call({"n": 1.0}), False),
        (call({"n": 0}), call({"n": False}), False),
        (call('{"n": 1}'), call({"n": 1}), True),
        (call('{"n": 1}'), call('{"n":1}'), True),
        (call('{"n": 1}'), call('{"n": true}'), False),
        (call('{"a": 1, "b": 2}'), call('{"b": 2, "a": 1}'), True),
        (call("{}"), call(None), True),
        (call("{}"), call("{}", content=None), True),
        (call("{}"), call("{}", reasoning_content="new"), False),
        (call("{}", reasoning_content="hm"), call("{}"), True),
        (call("{}"), {"role": "assistant", "content": ""}, False),
        ({"role": "user", "content": "a"}, {"role": "user", "content": "a "}, False),
        ({"role": "user", "content": "a"}, {"role": "tool", "content": "a"}, False),
        ({"role": "user", "content": "a"}, {"role": "user", "content": [{"text": "a"}]}, True),
        ({"role": "system", "content": "a"}, {"role": "developer", "content": "a"}, True),
    ],
)
def test_what_repeats_a_message(mine: dict[str, Any], theirs: dict[str, Any], same: bool) -> None:
    turn = turn_of(USER, mine)
    for _ in range(3):  # a form that has been seen is compared in another way
        assert turn.is_repeated_by([USER, theirs]) == same
        assert turn.is_repeated_by([USER, mine])


@pytest.mark.parametrize("raw", [None, 1, "x", [], {}, {"role": 5}, {"role": "user", "content": 5}])
def test_what_is_no_message_repeats_nothing(raw: Any) -> None:
    turn = turn_of({"role": "user", "content": ""}, USER)
    for _ in range(2):
        assert not turn.is_repeated_by([raw, USER])
        assert turn.is_repeated_by([{"role": "user"}, USER])


def test_deep_nesting_repeats_nothing() -> None:
    deep: Any = "x"
    for _ in range(50_000):
        deep = [deep]
    for name in ("content", "tool_calls", "role"):
        assert not turn_of(USER, USER).is_repeated_by([USER, {**USER, name: deep}])


def add(tree: Tree, parent: Turn | None, asked: list[str], said: str, **when: Any) -> Turn:
    ids = np.array(when.get("ids", [len(tree.turns)]), np.int32)
    index = len(tree.turns)
    turn = Turn(
        index=index,
        parent=parent,
        tools_key="",
        new=tuple(parse_message(user(text), "") for text in asked),
        answer=parse_message(assistant(said), ""),
        prompt_ids=np.frombuffer("".join(asked).encode(), np.uint8).astype(np.int32),
        output_ids=ids,
        logprobs=ids * -1.0,
        length=0,
        rid=str(index),
        versions=((1, 0, 1),),
        finish_reason="stop",
        started=when.get("started", 2 * index),
        ended=when.get("ended", 2 * index + 1),
    )
    tree.add(turn)
    return turn


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def test_the_deepest_turn_is_continued_and_of_two_the_newer() -> None:
    tree = Tree()
    root = add(tree, None, ["a"], "b")
    add(tree, None, ["a"], "other")
    child = add(tree, root, ["c"], "d")
    twin = add(tree, root, ["c"], "d")
    talk = [user("a"), assistant("b"), user("c"), assistant("d"), user("e")]
    assert tree.attach(talk, "") == (twin, 4)
    assert tree.attach(talk[:3], "") == (root, 2)
    assert tree.attach(talk[:2], "") == (root, 2)
    assert tree.attach(talk[:1], "") == (None, 0)
    assert tree.attach([user("x"), *talk], "") == (None, 0)
    assert tree.attach(talk, "other tools") == (None, 0)
    assert child not in tree.kept() and twin in tree.kept()


def test_a_retry_is_no_branch_and_a_parallel_call_is_one() -> None:
    tree = Tree()
    unused = add(tree, None, ["a"], "1", started=1, ended=2)
    first = add(tree, None, ["a"], "2", started=3, ended=6)
    second = add(tree, None, ["a"], "3", started=4, ended=5)
    assert unused not in tree.kept()
    assert tree.kept() == [first, second]
    add(tree, second, ["b"], "4", started=7, ended=8)
    again = add(tree, None, ["a"], "5", started=9, ended=10)
    # What was built on stays; of the others the last is the one that the client has.
    assert [turn.rid for turn in tree.kept()] == ["2", "3", again.rid]


def test_a_retry_of_a_follow_up_is_known_whichever_twin_it_continues() -> None:
    """The same question had the same answer twice: who goes on from it goes on from both."""
    tree = Tree()
    first = add(tree, None, ["a"], "same", ids=[7])
    follow_up = add(tree, first, ["b"], "1")
    twin = add(tree, None, ["a"], "same", ids=[7])
    again = add(tree, twin, ["b"], "2")
    assert follow_up.question() == again.question()
    assert tree.kept() == [twin, again], "the first of each is a retry that nobody used"


words = st.lists(st.sampled_from(["a", "b"]), min_size=1, max_size=3)
moves = st.lists(st.tuples(st.integers(0, 5), words, st.sampled_from("xyz")), max_size=12)


@given(moves)
def test_attaching_finds_the_longest_repetition(made: list[tuple[int, list[str], str]]) -> None:
    tree = Tree()
    for at, asked, said in made:
        parent = tree.turns[at % len(tree.turns)] if tree.turns and at else None
        add(tree, parent, asked, said)
    for turn in tree.turns:
        talk = [json.loads(json.dumps(m.raw())) for m in turn.messages()]
        found, length = tree.attach([*talk, user("new")], "")
        assert length == len(talk) and found is not None
        assert [m.content for m in found.messages()] == [m["content"] for m in talk]
