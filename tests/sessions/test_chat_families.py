"""Families: choice, parsing, and conversations that only grow at their end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from session_helpers import BASH, make_tokenizer

from miles_core.errors import UserError
from miles_core.sessions.families.family import NotAppendOnly, load_family
from miles_core.sessions.hermes import parse_answer
from miles_core.sessions.messages import MessageError, parse_messages

SMOL = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + "
    "message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "list"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "bash", "arguments": '{"command": "ls \\"é\\""}'}}],
    },
    {"role": "tool", "content": "a"},
    {"role": "tool", "content": "b"},
    {"role": "user", "content": "thanks"},
]


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"miles_chat_family": "terse"}, "terse"),
        ({"miles_chat_family": None, "chat_template": SMOL}, "chatml"),
        ({"miles_chat_family": None}, "chatml"),
        (
            {"miles_chat_family": None, "chat_template": "<tool_call> <tool_response>"},
            "qwen3",
        ),
        (
            {"miles_chat_family": None, "chat_template": SMOL + "{# <tool_call><function= #}"},
            "template",
        ),
    ],
)
def test_auto(config: dict[str, Any], name: str, tmp_path: Path) -> None:
    assert load_family(make_tokenizer(tmp_path, config)).name == name


@pytest.mark.parametrize("name", ["qwen3", "chatml", "terse"])
def test_suffixes_add_up_to_the_whole(name: str, tokenizer_dir: Path) -> None:
    family = load_family(tokenizer_dir, name)
    ids = family.render_prompt(TALK[:2], [BASH]) + family.render_output(TALK[2])
    ids += family.render_suffix(TALK[:3], TALK[3:], [BASH])
    assert ids == family.render_prompt(TALK, [BASH])
    assert ("# Tools" in family.tokenizer.decode(ids)) == (name != "terse")


def test_own_template(tmp_path: Path) -> None:
    plain = [{"role": m["role"], "content": m["content"] or "x"} for m in TALK]
    config = {"miles_chat_family": "template", "chat_template": SMOL}
    family = load_family(make_tokenizer(tmp_path, config))
    ids = family.render_prompt(plain[:2]) + family.render_output(plain[2])
    assert ids + family.render_suffix(plain[:3], plain[3:]) == family.render_prompt(plain)

    counting = "{{ messages | length }}" + SMOL
    config["chat_template"] = counting
    family = load_family(make_tokenizer(tmp_path / "counting", config))
    with pytest.raises(NotAppendOnly):
        family.render_suffix(plain[:3], plain[3:])

    config["chat_template"] = "{% for m in messages %}{{ m.content }} over. {% endfor %}"
    with pytest.raises(UserError, match="ends an answer"):
        load_family(make_tokenizer(tmp_path / "endless", config))

    config["chat_template"] = SMOL + "{% if tools %}{{ raise_exception('no tools') }}{% endif %}"
    family = load_family(make_tokenizer(tmp_path / "refusing", config))
    with pytest.raises(MessageError, match="no tools"):
        family.render_prompt(plain, [BASH])


def test_unknown_names_and_missing_files(tokenizer_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="unknown chat family"):
        load_family(tokenizer_dir, "klingon")
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        load_family(tmp_path)


@pytest.mark.parametrize(
    "bad",
    [
        "not json",
        '{"name": "bash"}',
        '{"name": "", "arguments": {}}',
        '{"name": "bash", "arguments": "ls"}',
        '{"name": "bash", "arguments": {"n": NaN}}',
        '{"name": "bash", "arguments": {"n": "\\ud800"}}',
        "[" * 100_000,
    ],
)
def test_malformed_calls_stay_text(bad: str) -> None:
    text = f'ok <tool_call>\n{{"name": "a", "arguments": {{}}}}\n</tool_call><tool_call>{bad}'
    for whole in (text, text + "</tool_call>"):
        message = parse_answer(whole)
        assert message.content == whole and not message.tool_calls


def test_lone_surrogates_of_a_client_can_be_rendered(tokenizer_dir: Path) -> None:
    family = load_family(tokenizer_dir)
    ids = family.render_prompt([{"role": "user", "content": "a\ud800b \U0001f600"}])
    assert "a\ufffdb \U0001f600" in family.tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("mine", "theirs", "same"),
    [
        ('{"a": 1, "b": [2]}', '{"b":[2],"a":1}', True),
        ('{"a": 1}', '{"a": true}', False),
        ('{"a": 1}', '{"a": "1"}', False),
        ("{}", "", True),
    ],
)
def test_arguments_are_compared_as_typed_json(mine: str, theirs: str, same: bool) -> None:
    first, second = (
        parse_messages(
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": a}}]}]
        )[0]
        for a in (mine, theirs)
    )
    assert first.same_as(second) == same
