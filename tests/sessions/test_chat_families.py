"""Families: choice, refusal, and conversations that only grow at their end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from session_helpers import BASH, make_tokenizer

from miles_core.errors import UserError
from miles_core.sessions.families import FAMILIES, ChatFamily, NotAppendOnly, load_family
from miles_core.sessions.families.features import FEATURES
from miles_core.sessions.families.jinja import OwnTemplate
from miles_core.sessions.families.registry import notation
from miles_core.sessions.families.terse import TEMPLATE
from miles_core.sessions.messages import MessageError, parse_messages
from miles_core.sessions.verify.check import verify
from miles_core.sessions.verify.corpus import Writer

SMOL = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + "
    "message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
XML = SMOL.replace(
    "message['content'] +",
    "message['content'] + (message.tool_calls | length and '<function=' + "
    "message.tool_calls[0].function.name + '>' or '') +",
).replace("{% for", "{{ tools | tojson if tools else '' }}{% for", 1)
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
PLAIN = [{"role": m["role"], "content": m["content"] or "x"} for m in TALK]


def with_template(directory: Path, template: str | None, **config: Any) -> Path:
    return make_tokenizer(
        directory, {"miles_chat_family": None, "chat_template": template, **config}
    )


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"miles_chat_family": "terse"}, "terse"),
        ({"chat_template": SMOL}, "chatml"),
        ({}, "chatml"),
        ({"chat_template": "{{ '<tool_call> <tool_response>' and ''}}" + XML}, "template"),
        ({"chat_template": [{"name": "default", "template": SMOL}]}, "chatml"),
    ],
)
def test_auto(config: dict[str, Any], name: str, tmp_path: Path) -> None:
    config = {"miles_chat_family": None} | config
    assert load_family(make_tokenizer(tmp_path, config)).name == name


@pytest.mark.parametrize(
    "name", ["qwen3", "qwen3-instruct", "qwen2.5", "chatml", "smollm2", "terse"]
)
def test_pieces_add_up_to_the_whole(name: str, tokenizer_dir: Path) -> None:
    family = load_family(tokenizer_dir, name)
    answered = family.render_output(TALK[2])
    ids = family.render_prompt(TALK[:2], [BASH]) + answered
    ids += family.continue_turn(TALK[:3], answered, TALK[3:], [BASH])
    assert ids == family.render_prompt(TALK, [BASH])
    assert ("# Tools" in family.tokenizer.decode(ids)) == (name != "terse")


def test_an_answer_that_was_cut_off_gets_its_end(tokenizer_dir: Path) -> None:
    family = load_family(tokenizer_dir)
    answered = family.render_output({"role": "assistant", "content": "Hello there"})
    whole = answered + family.continue_turn(TALK[:3], answered, TALK[5:])
    for cut in range(len(answered)):
        sampled = answered[:cut]
        ids = sampled + family.continue_turn(TALK[:3], sampled, TALK[5:])
        assert ids[:cut] == sampled
        assert ids[cut] == family.end_of_turn_id and ids[cut + 1 :] == whole[len(answered) :]


def test_another_stop_token_does_not_close_a_turn(tmp_path: Path) -> None:
    directory = make_tokenizer(tmp_path, {"eos_token": "<|endoftext|>"})
    family = load_family(directory)
    other = family.tokenizer.id_of("<|endoftext|>")
    assert other is not None and family.stop_token_ids == (family.end_of_turn_id, other)
    assert family.text_of([*family.tokenizer.encode("a"), other]) == "a"
    assert family.continue_turn(TALK[:3], [other], TALK[5:])[0] == family.end_of_turn_id


def test_own_template(tmp_path: Path) -> None:
    family = load_family(with_template(tmp_path, SMOL), "template")
    answered = family.render_output(PLAIN[2])
    ids = family.render_prompt(PLAIN[:2]) + answered
    ids += family.continue_turn(PLAIN[:3], answered, PLAIN[3:])
    assert ids == family.render_prompt(PLAIN) and family.notation.local
    refusing = SMOL + "{% if tools %}{{ raise_exception('no tools') }}{% endif %}"
    family = load_family(with_template(tmp_path / "refusing", refusing), "template")
    with pytest.raises(MessageError, match="no tools"):
        family.render_prompt(PLAIN, [BASH])


CALLING = SMOL.replace(
    "'<|im_end|>'",
    "((message.tool_calls[0].function | tojson) + '<|endoftext|>' if message.tool_calls else "
    "'<|im_end|>')",
)


def test_a_call_may_end_with_another_token(tmp_path: Path) -> None:
    family = load_family(with_template(tmp_path, CALLING), "template")
    assert family.notation.stops == ("<|im_end|>", "<|endoftext|>")
    answered = family.render_output(TALK[2])
    assert family.stop_of(answered) == "<|endoftext|>"
    ids = family.render_prompt(TALK[:2]) + answered
    ids += family.continue_turn(TALK[:3], answered, TALK[3:])
    assert ids == family.render_prompt(TALK)
    assert family.continue_turn(TALK[:3], answered[:-1], TALK[3:])[0] == family.end_of_turn_id


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ messages | length }}" + SMOL, "does not follow the generation prompt, at message 2"),
        ("{% if messages | length > 4 %}late{% endif %}" + SMOL, "rewrites earlier messages"),
        ("{% for m in messages %}{{ m.content }} over. {% endfor %}", "ends an answer"),
        (
            SMOL.replace("assistant\n", "assistant\n<think>"),
            "does not follow the generation prompt",
        ),
        ("{% if %}", "no Jinja template"),
        ("{{ raise_exception('never') }}", "never"),
        (None, "no chat template"),
    ],
)
def test_templates_that_are_refused(template: str | None, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said) as caught:
        load_family(with_template(tmp_path, template), "template")
    assert "--chat-family" in caught.value.fix


# The end of a user's turn is signed with the first user's text.
SIGNED = SMOL.replace("'<|im_end|>' + '\n'", "'<|im_end|>' + (messages[0].content if "
                      "message.role != 'assistant' else '') + '\n'")  # fmt: skip
# The first user's text stands before every answer, in the generation prompt too.
LOOKING_BACK = SMOL.replace(
    "'<|im_start|>assistant\n'", "'<|im_start|>assistant\n' + messages[0].content"
).replace("message['role'] + '\n' +", "message['role'] + '\n' + (messages[0].content if "
          "message.role == 'assistant' else '') +")  # fmt: skip
NUMBERED = SMOL.replace("message['role'] + '\n'", "message['role'] + (loop.index | string) + '\n'")
NUMBERED = NUMBERED.replace("assistant\n", "assistant' + (messages | length + 1) | string + '\n")


def exact(family: ChatFamily, talk: list[dict[str, Any]], answers: int, tools: Any = ()) -> bool:
    """Whether the pieces of a conversation are the ids that its template gives for it at once."""
    places = [i for i, message in enumerate(talk) if message["role"] == "assistant"][:answers]
    ids = family.render_prompt(talk[: places[0]], tools)
    for at, end in zip(places, [*places[1:], len(talk)], strict=True):
        output = family.render_output(talk[at])
        ids += output + family.continue_turn(talk[: at + 1], output, talk[at + 1 : end], tools)
    whole = OwnTemplate(family.tokenizer).render(parse_messages(talk), tools, True)
    return family.tokenizer.decode(ids) == whole


@pytest.mark.parametrize("template", [SIGNED, LOOKING_BACK, NUMBERED])
def test_a_template_that_looks_back_is_rendered_whole(template: str, tmp_path: Path) -> None:
    # A stand-in for the past is not enough.
    family = load_family(with_template(tmp_path, template), "template")
    assert not family.notation.local
    assert exact(family, PLAIN, 1)
    assert verify(family, number=10).ok


def test_a_template_that_rewrites_later_is_seen_where_it_does(tmp_path: Path) -> None:
    # Its corpus has no such message: what the proof has not met is still checked at each turn.
    moody = "{% if messages[-1].content | length == 6 %}rewritten{% endif %}" + SIGNED
    family = load_family(with_template(tmp_path, moody), "template")
    with pytest.raises(NotAppendOnly):
        family.continue_turn(PLAIN[:3], [family.end_of_turn_id], PLAIN[3:])


def test_nothing_fits(tmp_path: Path) -> None:
    dropping = SMOL.replace("messages %}", "messages[-3:] %}") + "<|endoftext|>"
    with pytest.raises(UserError) as caught:
        load_family(with_template(tmp_path, dropping))
    said = str(caught.value)
    assert "tried: qwen3" in said and "nearest: " in said and "at message" in said


def test_unknown_names_and_missing_files(tokenizer_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="unknown chat family") as caught:
        load_family(tokenizer_dir, "qwen4")
    assert "Did you mean qwen" in caught.value.fix
    with pytest.raises(UserError, match="unknown chat family 'klingon'"):
        load_family(make_tokenizer(tmp_path / "marked", {"miles_chat_family": "klingon"}))
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        load_family(tmp_path)
    with pytest.raises(UserError, match=r"llama3.*needs the tokens.*start_header_id"):
        load_family(tokenizer_dir, "llama3")


@pytest.mark.parametrize(
    ("alias", "name"),
    [("Qwen25", "qwen2.5"), ("qwen3_thinking", "qwen3-thinking"), ("smollm2", "smollm2")],
)
def test_aliases(alias: str, name: str, tokenizer_dir: Path) -> None:
    assert name in FAMILIES and load_family(tokenizer_dir, alias).name == name


def test_lone_surrogates_of_a_client_can_be_rendered(tokenizer_dir: Path) -> None:
    family = load_family(tokenizer_dir)
    ids = family.render_prompt([{"role": "user", "content": "a\ud800b \U0001f600"}])
    assert "a\ufffdb \U0001f600" in family.tokenizer.decode(ids)


def test_the_template_of_our_own_models_is_their_notation(tmp_path: Path) -> None:
    template = TEMPLATE.read_text()
    own = load_family(with_template(tmp_path, template), "template")
    terse = load_family(with_template(tmp_path / "terse", template), "terse")
    for talk in Writer(11, reasoning=False).conversations(60):
        tools, messages = list(talk.tools), list(talk.messages)
        assert own.render_text(messages, tools) == terse.render_text(messages, tools)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_documentation_lists_each_family_and_its_exceptions(name: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "sessions.md").read_text()
    assert f"\n| `{name}` | " in page
    exceptions = {} if name == "template" else notation(name).exceptions
    assert set(exceptions) <= set(FEATURES)
    for feature in exceptions:
        assert f"\n| `{name}` | {FEATURES[feature]} | " in page


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
