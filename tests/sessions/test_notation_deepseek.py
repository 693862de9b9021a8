"""DeepSeek-V3: a session's text, and that of the real template."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import pytest
from notation_helpers import TOOLS, Shape, random_conversation, render, walk
from real_tokenizers import tokenizer_dir
from tokenizers import Tokenizer

from miles_core.sessions.families.deepseek import DeepSeekV3
from miles_core.sessions.messages import Message, ToolCall
from miles_core.sessions.tokens import ChatTokenizer

SEEDS = range(150)
V3 = DeepSeekV3()
BEGIN, END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
LS, PWD = ToolCall("bash", {"command": "ls"}), ToolCall("pwd", {})
CALLS = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>bash\n```json\n"
    '{"command": "ls"}\n```<｜tool▁call▁end｜>\n'
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>pwd\n```json\n{}\n```<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>"
)
RESULTS = (
    "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>one<｜tool▁output▁end｜>\n"
    "<｜tool▁output▁begin｜>two<｜tool▁output▁end｜><｜tool▁outputs▁end｜>"
)


def prompt(messages: list[Message], tools: Any = ()) -> str:
    return V3.prompt(messages, tools)


def test_a_conversation_is_written_out() -> None:
    messages = [
        Message("system", "S"),
        Message("system", "T"),
        Message("user", "U"),
        Message("assistant", "C", (LS, PWD)),
        Message("tool", "one"),
        Message("tool", "two"),
    ]
    first = f"{BEGIN}S\n\nT<｜User｜>U<｜Assistant｜>"
    assert prompt(messages[:3]) == first
    assert prompt(messages) == f"{first}C{CALLS}{END}{RESULTS}"
    messages += [Message("assistant", "done"), Message("user", "more")]
    whole = f"{first}C{CALLS}{END}{RESULTS}done{END}<｜User｜>more<｜Assistant｜>"
    assert prompt(messages) == whole


def test_a_continuation_begins_with_the_end_of_an_answer_that_was_cut_off() -> None:
    answer, user = Message("assistant", "C"), [Message("user", "U")]
    assert V3.continuation([answer], END, user, []) == "<｜User｜>U<｜Assistant｜>"
    assert V3.continuation([answer], None, user, []) == f"{END}<｜User｜>U<｜Assistant｜>"
    tools = [Message("tool", "one"), Message("tool", "two")]
    assert V3.continuation([answer], END, tools, []) == RESULTS
    assert V3.continuation([answer], END, [], []) == "<｜Assistant｜>"


def test_tools_follow_the_system_message() -> None:
    without, tools = prompt([Message("user", "U")]), prompt([Message("user", "U")], TOOLS)
    assert without == f"{BEGIN}<｜User｜>U<｜Assistant｜>"
    assert tools.startswith(f"{BEGIN}# Tools\n\n")
    assert tools.endswith("<｜User｜>U<｜Assistant｜>")
    for tool in TOOLS:
        assert f"\n```json\n{json.dumps(tool, ensure_ascii=False)}\n```\n" in tools
    system = [Message("system", "S"), Message("user", "U")]
    assert prompt(system, TOOLS) == tools.replace("# Tools", "S\n\n# Tools", 1)


def test_a_later_system_message_is_a_user_s_turn() -> None:
    messages = [Message("user", "U"), Message("assistant", "C"), Message("system", "S")]
    assert prompt(messages).endswith(f"C{END}<｜User｜>S<｜Assistant｜>")


def test_a_session_is_the_text_of_its_conversation() -> None:
    for seed in SEEDS:
        messages = random_conversation(random.Random(seed))
        tools = TOOLS if seed % 2 else []
        assert "".join(walk(V3, messages, tools)) == prompt(messages, tools)


@cache
def template() -> str:
    return ChatTokenizer(tokenizer_dir("deepseek_v3")).chat_templates()["default"]


def rendered(messages: list[Message]) -> str:
    raw = [message.raw() for message in messages]
    for message in raw:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(
                call["function"]["arguments"], ensure_ascii=False
            )
            message["content"] = message["content"] or None
    return render(template(), raw, bos_token=BEGIN, add_generation_prompt=True)


def test_a_session_has_the_text_of_the_real_template() -> None:
    for seed in SEEDS:
        shape = Shape((True, False), (0,), late_system=False, stray_results=False)
        messages = random_conversation(random.Random(seed), shape)
        assert rendered(messages) == "".join(walk(V3, messages, []))


def test_the_first_calls_have_the_text_of_the_real_template() -> None:
    """Two calls without content, their results, an answer: what the template gets right."""
    for seed in SEEDS:
        shape = Shape((False,), (2,), (False,), False, False, False)
        calls = random_conversation(random.Random(seed), shape, 1)
        if calls[-1].role != "user":
            calls = [*calls, Message("assistant", "done"), Message("user", "more")]
            assert rendered(calls[:-2]) == "".join(walk(V3, calls[:-2], []))
            assert rendered(calls) == "".join(walk(V3, calls, []))


RESULT = Message("tool", "T")
EXCEPTIONS = {
    "call": [Message("assistant", "", (LS,)), RESULT],
    "content_beside_call": [Message("assistant", "C", (LS, PWD)), RESULT],
    "tool_result": [
        *(Message("assistant", "", (LS, PWD)), RESULT, RESULT),
        *(Message("assistant", "", (LS, PWD)), RESULT, RESULT),
    ],
    "late_system": [Message("assistant", "C"), Message("system", "S"), Message("user", "U")],
}


@pytest.mark.parametrize("feature", EXCEPTIONS)
def test_the_exceptions_are_real(feature: str) -> None:
    """What is listed as a departure from the template is one."""
    assert set(V3.exceptions) == {*EXCEPTIONS, "tools_ignored"}
    messages = [Message("user", "Q"), *EXCEPTIONS[feature]]
    assert rendered(messages) != "".join(walk(V3, messages, []))


def test_ids_of_the_pieces_are_ids_of_the_whole() -> None:
    """No token stretches over the joint between a prompt and an answer."""
    for seed in range(0, 150, 5):
        tokenizer = _tokenizer()
        pieces = walk(V3, random_conversation(random.Random(seed)), TOOLS)
        ids = [i for piece in pieces for i in tokenizer.encode(piece, add_special_tokens=False).ids]
        assert ids == tokenizer.encode("".join(pieces), add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == "".join(pieces)


@cache
def _tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(tokenizer_dir("deepseek_v3") / "tokenizer.json"))
