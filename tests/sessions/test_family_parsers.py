"""What is read out of answers: calls, reasoning, and what stays text."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core.sessions.families.registry import notation
from miles_core.sessions.messages import Message, ToolCall
from miles_core.sessions.parsers import hermes, llama3
from miles_core.sessions.parsers.qwen_xml import QwenXml
from miles_core.sessions.verify.corpus import make_tools

MALFORMED = [
    "not json",
    '{"name": "bash"}',
    '{"name": "", "arguments": {}}',
    '{"name": "bash", "arguments": "ls"}',
    '{"name": "bash", "arguments": {"n": NaN}}',
    '{"name": "bash", "arguments": {"n": 1e999}}',
    '{"name": "bash", "arguments": {"n": "\\ud800"}}',
    '{"name": "bash", "arguments": {}} and more',
    '["bash", {}]',
    "[" * 100_000,
]


@pytest.mark.parametrize("bad", MALFORMED)
def test_malformed_calls_stay_text(bad: str) -> None:
    good = '<tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>'
    for whole in (f"ok {good}<tool_call>{bad}", f"ok {good}<tool_call>{bad}</tool_call>"):
        assert hermes.parse_calls(whole) == (whole, ())
    for whole in (bad, f"ok <|python_tag|>{bad}", f'{{"name": "a", "parameters": {{}}}}; {bad}'):
        assert llama3.parse_calls(whole) == (whole, ())


def call(command: str = "ls", **more: Any) -> ToolCall:
    return ToolCall("bash", {"command": command, **more})


ONE = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (ONE, "", (call(),)),
        (f"I look.\n{ONE}", "I look.", (call(),)),
        (f"I look.\n\n{ONE}\n{ONE}\n", "I look.\n", (call(), call())),
        (f"{ONE} done", "done", (call(),)),
        (ONE.replace("\n", ""), "", (call(),)),
        (ONE.replace("ls", "echo </tool_call> <tool_call>"), "",
         (call("echo </tool_call> <tool_call>"),)),
        (f"</tool_call>{ONE}", f"</tool_call>{ONE}", ()),
        (f"{ONE}</tool_call>", f"{ONE}</tool_call>", ()),
        ("a < b", "a < b", ()),
        ("", "", ()),
    ],
)  # fmt: skip
def test_hermes(text: str, content: str, calls: tuple[ToolCall, ...]) -> None:
    assert hermes.parse_calls(text) == (content, calls)


JSON = '{"name": "bash", "parameters": {"command": "ls"}}'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (JSON, "", (call(),)),
        (f" {JSON}\n", "", (call(),)),
        (f"{JSON}; {JSON}", "", (call(), call())),
        (f"{JSON}\n{JSON}", "", (call(), call())),
        (f"<|python_tag|>{JSON}", "", (call(),)),
        (f"I look.<|python_tag|>{JSON}", "I look.", (call(),)),
        (JSON.replace("parameters", "arguments"), "", (call(),)),
        (f"I look. {JSON}", f"I look. {JSON}", ()),
        ('{"name": "Bob"}', '{"name": "Bob"}', ()),
        ("<|python_tag|>", "<|python_tag|>", ()),
    ],
)
def test_llama3(text: str, content: str, calls: tuple[ToolCall, ...]) -> None:
    assert llama3.parse_calls(text) == (content, calls)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>\nwhy\n</think>\n\nso", "why", "so"),
        ("\n<think>why</think>so", "why", "so"),
        ("<think>\n\n</think>\n\nso", "", "so"),
        ("<think>\nwhy", "why", ""),
        ("<think>\nwhy </th", "why </th", ""),
        ("so <think>why</think>", "", "so <think>why</think>"),
        ("<think>a</think>b</think>", "a", "b</think>"),
    ],
)
def test_reasoning(text: str, reasoning: str, content: str) -> None:
    assert notation("qwen3").parse(text) == Message("assistant", content, (), reasoning)
    if text.startswith("<think>\n"):
        opened = notation("qwen3-thinking").parse(text.removeprefix("<think>\n"))
        assert opened == Message("assistant", content, (), reasoning)
    assert notation("qwen3-instruct").parse(text) == Message("assistant", text)


def test_calls_in_unfinished_reasoning_are_none() -> None:
    assert notation("qwen3").parse(f"<think>\n{ONE}") == Message("assistant", "", (), ONE)


XML = (
    "I look.\n\n<tool_call>\n<function=bash>\n<parameter=command>\n{}\n</parameter>\n"
    "<parameter=count>\n3\n</parameter>\n<parameter=force>\nTrue\n</parameter>\n</function>\n"
    "</tool_call>"
)


@pytest.mark.parametrize("command", ["ls\n  -l\n", "42", "True", "", "<b>", "é"])
def test_qwen_xml(command: str) -> None:
    import random

    tools = make_tools(random.Random(0))
    found = QwenXml(False).parse(XML.format(command), tools)
    assert found == Message("assistant", "I look.", (call(command, count=3, force=True),))
    opened = QwenXml(True).parse("why\n</think>\n\n" + XML.format(command), tools)
    assert opened.tool_calls == found.tool_calls and opened.reasoning_content == "why"
    without = QwenXml(False).parse(XML.format("ls"))
    assert without.tool_calls[0].arguments == {"command": "ls", "count": 3, "force": True}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("</tool_call>", ""),
        ("</function>", ""),
        ("<function=bash>", "<function=>"),
        ("<parameter=count>", "<parameter=command>"),
        ("<parameter=count>", "<parameter=>"),
        ("<parameter=count>", "and <parameter=count>"),
        ("<function=bash>", ""),
    ],
)
def test_malformed_xml_stays_text(old: str, new: str) -> None:
    text = XML.format("ls").replace(old, new)
    assert QwenXml(False).parse(text) == Message("assistant", text)


NAMES = ["qwen3", "qwen3-thinking", "qwen2.5", "llama3"]
PIECES = st.sampled_from(
    ["<think>", "</think>", "<tool_call>", "</tool_call>", ONE, JSON, "<|python_tag|>", "<thi",
     "<tool", "{", "\n", "\n\n", " ", "so", "; ", '{"name": "bash", '],
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=300, deadline=None)
@given(st.lists(PIECES, max_size=8).map("".join))
def test_what_is_settled_only_grows(name: str, text: str) -> None:
    read = notation(name)
    whole = read.parse(text)
    sent = [read.settled(text[:end]) for end in range(len(text) + 1)]
    for (thought, content), (more_thought, more_content) in itertools.pairwise(sent):
        assert more_thought.startswith(thought) and more_content.startswith(content)
    assert whole.reasoning_content.startswith(sent[-1][0]) and whole.content.startswith(sent[-1][1])


def test_something_is_settled_before_the_end() -> None:
    assert notation("qwen3").settled("<think>\nI wonder</th") == ("I wonder", "")
    assert notation("qwen3").settled("<think>\nI\n</think>\n\nSo it is") == ("I", "So it is")
    assert notation("qwen2.5").settled("So it is\n<tool_ca") == ("", "So it is")
    assert notation("llama3").settled("So it is<|py") == ("", "So it is")
    assert notation("llama3").settled(' {"name"') == ("", "")


def test_a_flood_of_marks_is_read_in_time() -> None:
    """Reading is linear: a quadratic reader would need hours for these."""
    for flood in ("<tool_call>", "<tool_call>{", "<tool_call></tool_call>", "<think>", "{"):
        text = flood * 200_000
        for name in NAMES:
            assert notation(name).parse(text).tool_calls == ()
