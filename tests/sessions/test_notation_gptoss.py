"""gpt-oss: a session's text, and that of the real template."""

from __future__ import annotations

import random
from datetime import datetime
from functools import cache
from typing import Any

import pytest
from notation_helpers import TOOLS, Shape, random_conversation, random_value, render, walk
from real_tokenizers import template_text, tokenizer_dir
from tokenizers import Tokenizer

from miles_core.sessions.families.gptoss import GptOss
from miles_core.sessions.messages import Message, ToolCall

SEEDS = range(150)
GPT_OSS = GptOss()
LS, PWD = ToolCall("bash", {"command": "ls"}, "a"), ToolCall("pwd", {}, "b")
NEXT = "<|start|>assistant"


def test_the_opening_has_the_client_s_system_message_as_the_developer_s() -> None:
    today = datetime.now().strftime("%Y-%m-%d")
    assert GPT_OSS.conversation([Message("system", "S"), Message("user", "U")], []) == (
        "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n"
        f"Knowledge cutoff: 2024-06\nCurrent date: {today}\n\nReasoning: medium\n\n"
        "# Valid channels: analysis, commentary, final. Channel must be included for every message."
        "<|end|><|start|>developer<|message|># Instructions\n\nS\n\n<|end|>"
        "<|start|>user<|message|>U<|end|>"
    )


def test_tools_are_written_as_types() -> None:
    text = GPT_OSS.conversation([Message("user", "U")], TOOLS[:1])
    assert "\nCalls to these tools must go to the commentary channel: 'functions'.<|end|>" in text
    assert (
        "<|start|>developer<|message|># Tools\n\n## functions\n\nnamespace functions {\n\n"
        "// Run a command.\nIts output is the result.\n"
        "type bash = (_: {\n// what to run\ncommand: string,\n"
        "// seconds\ntimeout?: number, // default: 30,\nlines?: number[],\nraw?: boolean,\n"
        "}) => any;\n\n} // namespace functions<|end|>"
    ) in text


def test_an_answer_is_a_sequence_of_messages() -> None:
    answer = GPT_OSS.answer
    assert answer(Message("assistant", "C", (), "R")) == (
        f"<|channel|>analysis<|message|>R<|end|>{NEXT}<|channel|>final<|message|>C<|return|>"
    )
    call = ' to=functions.bash<|channel|>commentary json<|message|>{"command": "ls"}'
    assert answer(Message("assistant", "", (LS,))) == f"{call}<|call|>"
    assert answer(Message("assistant", "C", (LS, PWD), "R")) == (
        f"<|channel|>analysis<|message|>R<|end|>{NEXT}<|channel|>commentary<|message|>C<|end|>"
        f"{NEXT}{call}<|end|>"
        f"{NEXT} to=functions.pwd<|channel|>commentary json<|message|>{{}}<|call|>"
    )


def test_a_result_names_its_tool() -> None:
    """By the call's id, else as the result itself says, else by its place."""
    calls = Message("assistant", "", (LS, PWD))

    def names(*results: Message) -> list[str]:
        text = GPT_OSS.continuation([calls], "<|call|>", results, [])
        return [part.split(" ")[0] for part in text.split("<|start|>functions.")[1:]]

    assert names(Message("tool", "x", (), "", "b"), Message("tool", "y", (), "", "a")) == [
        "pwd",
        "bash",
    ]
    assert names(Message("tool", "x", (), "", "?", "own"), Message("tool", "y")) == ["own", "pwd"]
    assert names(*[Message("tool", "x")] * 3) == ["bash", "pwd", "pwd"]
    text = GPT_OSS.continuation([calls], "<|call|>", [Message("tool", 'a "b"\n')], [])
    assert text == (
        "<|start|>functions.bash to=assistant<|channel|>commentary<|message|>"
        f'"a \\"b\\"\\n"<|end|>{NEXT}'
    )


def test_the_sampled_stop_stays_and_a_cut_answer_gets_one() -> None:
    answer, user = Message("assistant", "C"), [Message("user", "U")]
    rest = f"<|start|>user<|message|>U<|end|>{NEXT}"
    for stop in GPT_OSS.stops:
        assert GPT_OSS.continuation([answer], stop, user, []) == rest
    assert GPT_OSS.continuation([answer], None, user, []) == "<|return|>" + rest


def test_the_date_does_not_change_while_a_server_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    import miles_core.sessions.families.gptoss as module

    notation, before = GptOss(), GPT_OSS.conversation([Message("user", "U")], [])

    class Later:
        @staticmethod
        def now() -> datetime:
            return datetime(2199, 1, 1)

    monkeypatch.setattr(module, "datetime", Later)
    assert notation.conversation([Message("user", "U")], []) == before
    assert "2199-01-01" in GptOss().conversation([Message("user", "U")], [])


def test_a_session_is_the_text_of_its_conversation() -> None:
    for seed in SEEDS:
        messages = random_conversation(random.Random(seed))
        tools = TOOLS if seed % 2 else []
        whole = GPT_OSS.prompt(messages, tools)
        assert "".join(walk(GPT_OSS, messages, tools)) == whole


def test_a_session_has_the_text_of_the_real_template() -> None:
    """But for `<|return|>`, which the template does not keep."""
    for seed in SEEDS:
        shape = Shape((False,), (0, 1), (False,), False, False, True)
        messages = random_conversation(random.Random(seed), shape)
        tools = TOOLS if seed % 2 else []
        session = "".join(walk(GPT_OSS, messages, tools))
        assert rendered(messages, tools) == session.replace("<|return|>", "<|end|>")


def test_reasoning_beside_calls_has_the_text_of_the_real_template() -> None:
    """The template keeps it as long as no answer without a call follows."""
    for seed in SEEDS:
        shape = Shape((True, False), (1,), (False,), False, False, True)
        messages = random_conversation(random.Random(seed), shape)
        assert rendered(messages, TOOLS) == "".join(walk(GPT_OSS, messages, TOOLS))


def rendered(messages: list[Message], tools: Any) -> str:
    raw = [message.raw() for message in messages]
    for message in raw:
        if "reasoning_content" in message:
            message["thinking"] = message.pop("reasoning_content")
    values = {"tools": tools or None, "add_generation_prompt": True}
    return render(template_text("trl/gptoss"), raw, **values)


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    kind = rng.choice(["string", "number", "integer", "boolean", "array", "object", "list", "one"])
    schema: dict[str, Any] = {"type": kind}
    if kind in ("list", "one") or depth > 2:
        schema = {"type": ["string", "null"]} if kind == "list" else {}
        if kind == "one" and depth < 2:
            schema["oneOf"] = [random_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]
    elif kind == "array" and rng.random() < 0.8:
        schema["items"] = random_schema(rng, depth + 1)
    elif kind == "object" and rng.random() < 0.8:
        schema["properties"] = {f"p{i}": random_schema(rng, depth + 1) for i in range(2)}
        schema["required"] = ["p0"] if rng.random() < 0.5 else []
    elif kind == "string" and rng.random() < 0.5:
        schema |= {"enum": ["a", "b"], "default": "a"}
    if rng.random() < 0.3:
        schema["description"] = "some\ntext – 描述"
    if rng.random() < 0.3 and "enum" not in schema and "oneOf" not in schema:
        schema |= {"default": random_value(rng), "nullable": rng.random() < 0.5}
    return schema


def test_definitions_of_tools_have_the_text_of_the_real_template() -> None:
    for seed in range(300):
        rng = random.Random(seed)
        parameters = {
            "type": "object",
            "properties": {f"a{i}": random_schema(rng) for i in range(3)},
        }
        parameters["required"] = ["a1"]
        function = {"name": "f", "description": "d", "parameters": parameters}
        tools = [{"type": "function", "function": function}]
        messages = [Message("user", "U")]
        text = GPT_OSS.prompt(messages, tools)
        assert rendered(messages, tools) == text


@pytest.mark.parametrize(
    "parameters",
    [None, [], "x", {"properties": []}, {"properties": {"a": None, "b": {"type": 7}}},
     {"properties": {"a": {"type": "array", "items": 3}}, "required": "a"},
     {"properties": {"a": {"oneOf": ["x"]}, "b": {"type": "string", "enum": [1, None]}}}],
)  # fmt: skip
def test_odd_definitions_of_tools_are_rendered(parameters: Any) -> None:
    function = {"name": "f", "parameters": parameters}
    assert "type f = " in GPT_OSS.conversation([Message("user", "U")], [{"function": function}])


def test_a_deep_definition_of_a_tool_is_rendered() -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(3000):
        schema = {"type": "array", "items": schema}
    function = {"name": "f", "parameters": {"properties": {"a": schema}}}
    assert "any" in GPT_OSS.conversation([Message("user", "U")], [{"function": function}])


EXCEPTIONS = {
    "no_call": [Message("assistant", "C"), Message("user", "U")],
    "reasoning": [Message("assistant", "C", (), "R"), Message("user", "U")],
    "several_calls": [Message("assistant", "", (LS, PWD)), Message("tool", "T")],
    "content_beside_call": [Message("assistant", "C", (LS,)), Message("tool", "T")],
    "late_system": [Message("system", "S"), Message("user", "U")],
}


@pytest.mark.parametrize("feature", EXCEPTIONS)
def test_the_exceptions_are_real(feature: str) -> None:
    """What is listed as a departure from the template is one."""
    assert feature in GPT_OSS.exceptions
    messages = [Message("user", "Q"), *EXCEPTIONS[feature]]
    assert rendered(messages, []) != "".join(walk(GPT_OSS, messages, []))


def test_all_exceptions_are_shown() -> None:
    refused = {"all_in_one", "late_tool_result"}
    assert set(GPT_OSS.exceptions) == {*EXCEPTIONS, *refused}
    messages = [Message("user", "Q"), Message("assistant", "C", (LS,), "R"), Message("tool", "T")]
    for refusing in (messages, [messages[0], messages[2]]):
        with pytest.raises(Exception, match="Cannot pass both|no previous assistant message"):
            rendered(refusing, [])


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(tokenizer_dir("gptoss") / "tokenizer.json"))


def test_ids_of_the_pieces_are_ids_of_the_whole() -> None:
    """No token stretches over the joint between a prompt and an answer."""
    for seed in range(0, 150, 5):
        messages = random_conversation(random.Random(seed))
        pieces = walk(GPT_OSS, messages, TOOLS)
        encode = tokenizer().encode
        ids = [i for piece in pieces for i in encode(piece, add_special_tokens=False).ids]
        assert ids == encode("".join(pieces), add_special_tokens=False).ids
        assert tokenizer().decode(ids, skip_special_tokens=False) == "".join(pieces)
