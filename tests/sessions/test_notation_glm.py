"""GLM-4.5 and GLM-4.7: a session's text, and that of the real templates."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from notation_helpers import (
    TOOLS,
    Shape,
    random_conversation,
    render,
    stop_of,
    walk,
)
from real_tokenizers import template_text, tokenizer_dir
from tokenizers import Tokenizer

from miles_core.sessions.families.glm import Glm45, Glm47
from miles_core.sessions.messages import Message, ToolCall

SEEDS = range(150)
NOTATIONS = [Glm45(), Glm47()]
BASH = ToolCall("bash", {"command": "ls", "timeout": 5}, "a")


@pytest.fixture(params=NOTATIONS, ids=lambda notation: notation.name)
def glm(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_a_conversation_of_glm45_is_written_out() -> None:
    messages = [
        Message("system", "S"),
        Message("user", "U"),
        Message("assistant", "C", (BASH, BASH), "R"),
        Message("tool", "one"),
        Message("tool", "two"),
        Message("assistant", "done"),
    ]
    call = (
        "\n<tool_call>bash\n<arg_key>command</arg_key>\n<arg_value>ls</arg_value>\n"
        "<arg_key>timeout</arg_key>\n<arg_value>5</arg_value>\n</tool_call>"
    )
    assert Glm45().conversation(messages, []) == (
        f"[gMASK]<sop><|system|>\nS<|user|>\nU<|assistant|>\n<think>R</think>\nC{call}{call}"
        "<|observation|>\n<tool_response>\none\n</tool_response>"
        "\n<tool_response>\ntwo\n</tool_response><|assistant|>\n<think></think>\ndone"
    )


def test_a_conversation_of_glm47_is_written_out() -> None:
    messages = [
        Message("user", "U"),
        Message("assistant", "C", (BASH,), "R"),
        Message("tool", "one"),
    ]
    call = (
        "<tool_call>bash<arg_key>command</arg_key><arg_value>ls</arg_value>"
        "<arg_key>timeout</arg_key><arg_value>5</arg_value></tool_call>"
    )
    notation = Glm47()
    assert notation.prompt(messages, []) == (
        f"[gMASK]<sop><|user|>U<|assistant|><think>R</think>C{call}"
        "<|observation|><tool_response>one</tool_response><|assistant|><think>"
    )
    assert notation.answer(messages[1]) == f"R</think>C{call}<|observation|>"


def test_the_sampled_opener_of_the_next_turn_is_not_written_again(glm: Any) -> None:
    answer, line = Message("assistant", "C"), glm.line
    prompt = glm.generation_prompt(None)
    user, tool = [Message("user", "U")], [Message("tool", "T")]
    result = f"{line}<tool_response>{line}T{line}</tool_response>{prompt}"
    assert glm.continuation([answer], "<|user|>", user, []) == f"{line}U{prompt}"
    assert glm.continuation([answer], "<|observation|>", tool, []) == result
    assert glm.continuation([answer], None, user, []) == f"<|user|>{line}U{prompt}"
    assert glm.continuation([answer], None, tool, []) == f"<|observation|>{result}"


def test_a_turn_that_was_not_announced_keeps_the_sampled_token(glm: Any) -> None:
    answer, line = Message("assistant", "C", (BASH,)), glm.line
    prompt = glm.generation_prompt(None)
    user = f"<|user|>{line}U{prompt}"
    for stop in ("<|observation|>", "<|endoftext|>"):
        assert glm.continuation([answer], stop, [Message("user", "U")], []) == user
    tool = glm.continuation([answer], "<|user|>", [Message("tool", "T")], [])
    assert tool.startswith(f"<|observation|>{line}<tool_response>")
    system = [Message("system", "S")]
    assert glm.continuation([answer], "<|user|>", system, []) == f"<|system|>{line}S{prompt}"
    assert glm.continuation([answer], None, system, []) == f"<|user|><|system|>{line}S{prompt}"


def test_a_session_is_the_text_of_its_conversation(glm: Any) -> None:
    for seed in SEEDS:
        messages = random_conversation(random.Random(seed))
        tools = TOOLS if seed % 2 else []
        whole = glm.prompt(messages, tools)
        assert "".join(walk(glm, messages, tools)) == whole, seed


def _usual(glm: Any) -> Shape:
    """What the template does not depart from the notation in."""
    return Shape(
        reasoning=(True,) if glm.opened else (True, False),
        late_system=False,
        stray_results=False,
        unanswered_calls=False,
    )


@pytest.mark.parametrize(
    ("glm", "template"),
    [
        (Glm45(), "trl/glm4moe"),
        pytest.param(Glm45(), "llama.cpp/GLM-4.6", marks=pytest.mark.slow),
        pytest.param(Glm47(), "llama.cpp/GLM-4.7-Flash", marks=pytest.mark.slow),
    ],
    ids=["glm45-4.5", "glm45-4.6", "glm47"],
)
def test_a_session_has_the_text_of_the_real_template(glm: Any, template: str) -> None:
    for seed in SEEDS:
        messages = random_conversation(random.Random(seed), _usual(glm))
        tools = TOOLS if seed % 2 else []
        if not glm.opened:  # GLM-4.5 has no switch that keeps old reasoning
            messages = _without_old_reasoning(messages)
        assert _rendered(template, messages, tools) == "".join(walk(glm, messages, tools)), seed


def _rendered(name: str, messages: list[Message], tools: Any) -> str:
    raw = [message.raw() for message in messages]
    values = {"tools": tools or None, "add_generation_prompt": True, "clear_thinking": False}
    return render(template_text(name), raw, **values)


def _without_old_reasoning(messages: list[Message]) -> list[Message]:
    """No answer before the last user's message has reasoning."""
    last = max(i for i, message in enumerate(messages) if message.role == "user")
    return [
        Message("assistant", m.content, m.tool_calls) if m.role == "assistant" and i < last else m
        for i, m in enumerate(messages)
    ]


@pytest.mark.parametrize(
    ("glm", "template"),
    [
        (Glm45(), "trl/glm4moe"),
        pytest.param(Glm47(), "llama.cpp/GLM-4.7-Flash", marks=pytest.mark.slow),
    ],
    ids=["glm45", "glm47"],
)
def test_the_exceptions_are_real(glm: Any, template: str) -> None:
    """What is listed as a departure from the template is one."""
    user, answer = Message("user", "U"), Message("assistant", "C", (), "R")
    cases = {
        "old_reasoning": [user, answer, user],
        "no_reasoning": [user, Message("assistant", "C"), user],
        "late_system": [user, answer, Message("system", "S"), user],
        "late_tool_result": [user, answer, Message("tool", "T")],
        "user_after_call": [user, replace(answer, tool_calls=(ToolCall("f", {}),)), user],
    }
    for feature in glm.exceptions:
        raw = [message.raw() for message in cases[feature]]
        text = render(template_text(template), raw, add_generation_prompt=True)
        assert text != "".join(walk(glm, cases[feature], [])), feature


@pytest.mark.parametrize("seed", range(0, 150, 5))
def test_ids_of_the_pieces_are_ids_of_the_whole(glm: Any, seed: int) -> None:
    """No token stretches over the joint between a prompt and an answer."""
    tokenizer = _tokenizer()
    messages = random_conversation(random.Random(seed))
    pieces = walk(glm, messages, TOOLS)
    ids = [i for piece in pieces for i in tokenizer.encode(piece, add_special_tokens=False).ids]
    assert ids == tokenizer.encode("".join(pieces), add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == "".join(pieces)


@cache
def _tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(tokenizer_dir("glm") / "tokenizer.json"))


def test_arguments_that_are_no_object_are_rendered(glm: Any) -> None:
    for arguments in ("{not json", ["a"], 7, None):
        text = glm.answer(Message("assistant", "", (ToolCall("bash", arguments),)))
        assert "bash" in text
        assert stop_of(glm, text) == "<|observation|>"
