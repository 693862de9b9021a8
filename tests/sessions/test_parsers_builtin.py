"""What models answer, as the built-in parsers read it."""

from __future__ import annotations

import random

import pytest
from notation_helpers import (
    TOOLS,
    Shape,
    check_settled,
    hostile_texts,
    random_answer,
    stop_of,
)
from parser_corpus import Case, corpus

from miles_core.sessions.families.deepseek import DeepSeekV3
from miles_core.sessions.families.glm import Glm45, Glm47
from miles_core.sessions.families.gptoss import GptOss
from miles_core.sessions.messages import Message, ToolCall

NOTATIONS = {n.name: n for n in (Glm45(), Glm47(), DeepSeekV3(), GptOss())}
MARKS = {
    "glm": ("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>",
            "<arg_value>", "</arg_value>", "bash", "\n", "<tool_call>now</tool_call>"),
    "deepseek": ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>",
                 "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "function", "\n```json\n", "\n```", "{}"),
    "gpt-oss": ("<|start|>", "<|start|>assistant", "<|channel|>", "<|message|>", "<|end|>",
                "<|call|>", "<|return|>", "<|constrain|>", "analysis", "final", "commentary",
                " to=functions.bash", "json", "{}", "<|channel|>final<|message|>"),
}  # fmt: skip


def marks_of(name: str) -> tuple[str, ...]:
    return next(marks for start, marks in MARKS.items() if name.startswith(start))


CASES = [(name, case) for name in NOTATIONS for case in corpus(name)]


@pytest.mark.parametrize(("name", "case"), CASES, ids=lambda x: x if isinstance(x, str) else x.name)
def test_an_answer_is_read_as_it_is_meant(name: str, case: Case) -> None:
    message = NOTATIONS[name].parse(case.text, case.tools)
    calls = tuple(ToolCall(*call) for call in case.calls)
    content, reasoning = case.content, case.reasoning
    if case.malformed and name == "glm47":
        content = content.removeprefix("</think>")
    assert message == Message("assistant", content, calls, reasoning)
    for mine, theirs in zip(message.tool_calls, calls, strict=True):
        assert repr(mine.arguments) == repr(theirs.arguments)  # 1, 1.0 and True are equal


@pytest.mark.parametrize(("name", "case"), CASES, ids=lambda x: x if isinstance(x, str) else x.name)
def test_what_is_streamed_begins_what_is_read(name: str, case: Case) -> None:
    check_settled(NOTATIONS[name], case.text)


@pytest.mark.parametrize("name", NOTATIONS)
def test_plain_content_is_streamed_at_once(name: str) -> None:
    notation, opened = NOTATIONS[name], {"glm47": "</think>"}.get(name, "")
    if name == "gpt-oss":
        opened = (
            "<|channel|>analysis<|message|>R<|end|><|start|>assistant<|channel|>final<|message|>"
        )
    text = opened + "one two three"
    assert notation.settled(text)[1] == "one two three"
    assert notation.settled(f"{text} <")[1].startswith("one two three")
    if name == "gpt-oss":
        assert notation.settled("<|channel|>analysis<|message|>R") == ("R", "")
        assert notation.settled("no harmony") == ("", "no harmony")


@pytest.mark.parametrize("name", NOTATIONS)
def test_a_written_answer_is_read_back(name: str) -> None:
    notation = NOTATIONS[name]
    for seed in range(400):
        answer = random_answer(random.Random(seed), Shape(), 0)
        text = notation.answer(answer)
        stop = stop_of(notation, text)
        assert stop is not None
        read = notation.parse(text.removesuffix(stop), TOOLS)
        assert answer.content.strip() == read.content.strip(), seed
        assert answer.tool_calls == read.tool_calls, seed
        expected = answer.reasoning_content.strip() if notation.reasoning else ""
        assert read.reasoning_content.strip() == expected


@pytest.mark.parametrize("name", NOTATIONS)
def test_anything_is_read_without_an_error_and_streams(name: str) -> None:
    notation = NOTATIONS[name]
    for text in hostile_texts(notation, marks_of(name), 400):
        check_settled(notation, text)


@pytest.mark.parametrize("name", NOTATIONS)
def test_nothing_of_an_answer_is_lost(name: str) -> None:
    """Words outside of marks are in what is read, wherever they stand."""
    notation = NOTATIONS[name]
    for number, text in enumerate(hostile_texts(notation, marks_of(name), 300)):
        word = f"w{number}w"
        for at in {0, len(text) // 3, len(text) // 2, len(text)}:
            read = notation.parse(text[:at] + word + text[at:])
            calls = "".join(call.name + str(call.arguments) for call in read.tool_calls)
            found = word in read.content + read.reasoning_content + calls
            assert found or "<" in text[max(at - 30, 0) : at + 30], (text[:at], text[at:], read)


@pytest.mark.parametrize("name", NOTATIONS)
def test_long_hostile_text_is_read(name: str) -> None:
    """Repeated marks, which a parser of more than linear time would not get to the end of."""
    notation = NOTATIONS[name]
    marks: list[str] = [*marks_of(name), " ", "\n", "{", '{"a":', "[", "<", "<think>a", "to="]
    marks += ["".join(marks_of(name)), "<|end|><|start|>assistant<|channel|>final<|message|>x"]
    for mark in marks:
        text = mark * (400_000 // len(mark))
        read, sent = notation.parse(text, TOOLS), notation.settled(text)
        assert read.role == "assistant"
        assert read.content.startswith(sent[1])
        assert read.reasoning_content.startswith(sent[0])
