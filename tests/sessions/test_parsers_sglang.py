"""SGLang's parsers give what the built-in ones give; skipped where SGLang cannot be imported."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
from notation_helpers import TOOLS, Shape, hostile_texts, random_answer, stop_of
from parser_corpus import Case, corpus

from miles_core.sessions.families.registry import FAMILIES, notation
from miles_core.sessions.messages import Message, ToolCall
from miles_core.sessions.parsers import sglang_modules
from miles_core.sessions.parsers.sglang import Parse, sglang_parser

NAMES = ("chatml", "smollm2", "qwen2.5", "qwen3-instruct", "qwen3", "qwen3-thinking",
         "glm45", "glm47", "llama3", "llama3.2", "deepseek-v3", "gpt-oss")  # fmt: skip
MARKS = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>"),
    *("<arg_value>", "</arg_value>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    *("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "function", "\n```json\n"),
    *("<|start|>assistant", "<|channel|>analysis", "<|channel|>final", "<|message|>", "<|end|>"),
    *("<|python_tag|>", ";", '{"name": "bash", "arguments": {}}', "bash", "{}", "\n"),
)


@cache
def theirs(name: str) -> Parse:
    parse = sglang_parser(name)
    if parse is None:
        pytest.skip("SGLang's parsers cannot be imported here")
    return parse


def exact(message: Message) -> tuple[Any, ...]:
    """A message with 1, 1.0 and True told apart."""
    calls = [(call.name, repr(call.arguments)) for call in message.tool_calls]
    return message.role, message.content, message.reasoning_content, calls


def test_families_without_a_parser_have_none() -> None:
    for name in ("template", "terse", "llama3.0", "nothing"):
        assert sglang_parser(name) is None
    assert set(NAMES) <= set(FAMILIES)


def test_there_is_none_where_sglang_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_modules.importlib.util, "find_spec", lambda name: None)
    monkeypatch.delitem(sglang_modules.sys.modules, "sglang", raising=False)
    sglang_modules.load_sglang.cache_clear()
    try:
        assert sglang_parser("qwen3") is None
    finally:
        sglang_modules.load_sglang.cache_clear()


def meaning(case: Case) -> tuple[Any, ...]:
    """What an answer means."""
    content = case.content
    if case.malformed:
        content = content.removeprefix("</think>").lstrip("\n")
    calls = tuple(ToolCall(*call) for call in case.calls)
    return exact(Message("assistant", content, calls, case.reasoning))


@pytest.mark.parametrize("name", NAMES)
def test_the_built_in_parser_reads_answers_as_they_are_meant(name: str) -> None:
    for case in corpus(name):
        assert exact(notation(name).parse(case.text, case.tools)) == meaning(case), case.name


@pytest.mark.parametrize("name", NAMES)
def test_sglang_s_parser_reads_answers_as_they_are_meant(name: str) -> None:
    for case in corpus(name):
        assert exact(theirs(name)(case.text, case.tools)) == meaning(case), case.name


@pytest.mark.parametrize("name", NAMES)
def test_both_read_random_answers_alike(name: str) -> None:
    parse, own = theirs(name), notation(name)
    for seed in range(150):
        text = own.answer(random_answer(random.Random(seed), Shape(), 0))
        text = text.removesuffix(stop_of(own, text) or "")
        assert exact(parse(text, TOOLS)) == exact(own.parse(text, TOOLS)), text


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("depth", [50, 300, 100_000])
def test_deep_arguments_are_read_or_stay_text(name: str, depth: int) -> None:
    deep = "[" * depth + "]" * depth
    for case in corpus(name):
        text = case.text.replace('"ls -la"', deep).replace(">ls -la<", f">{deep}<")
        read = theirs(name)(text, TOOLS)
        assert exact(read) == exact(notation(name).parse(text, TOOLS)), case.name


@pytest.mark.parametrize("name", NAMES)
def test_both_read_hostile_text_alike(name: str) -> None:
    parse, own = theirs(name), notation(name)
    for text in hostile_texts(own, MARKS, 300):
        assert exact(parse(text, TOOLS)) == exact(own.parse(text, TOOLS)), text


@pytest.mark.parametrize(
    "tools",
    [
        [{}],
        [{"function": 1}],
        [{"function": {"name": "bash"}}],
        [{"function": {"name": "bash", "parameters": {"type": 7}}}],
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_odd_definitions_of_tools_change_nothing(name: str, tools: Any) -> None:
    case = next(c for c in corpus(name) if c.name == "arguments: plain")
    read = theirs(name)(case.text, tools)
    assert exact(read) == exact(notation(name).parse(case.text, tools))
    assert read.tool_calls
