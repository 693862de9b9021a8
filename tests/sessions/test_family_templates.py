"""The notation `template`, over templates that each do one thing which might deceive it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from real_tokenizers import template_text
from session_helpers import BASH, make_tokenizer
from tokenizers import AddedToken, Tokenizer
from transformers import AutoTokenizer

from miles_core.errors import UserError
from miles_core.sessions.families import ChatFamily, load_family
from miles_core.sessions.families.jinja import OwnTemplate, literals
from miles_core.sessions.families.own_template import TemplateNotation
from miles_core.sessions.messages import MessageError, parse_messages
from miles_core.sessions.tokens import ChatTokenizer
from miles_core.sessions.verify.check import verify

ANSWER = (
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}THOUGHT{% endif %}"
    "{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "BEFORE[{{ call.function.name }}({{ call.function.arguments | tojson }})]AFTER{% endfor %}"
    "{% if message.tool_calls %}LAST{% else %}<|im_end|>{% endif %}\n"
)
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' %}ANSWER"
    "{% else %}{{ message.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
).replace("ANSWER", ANSWER)
MARK = "<|mark|>"
PLACES = ("THOUGHT", "BEFORE", "AFTER")


def directory(path: Path, template: Any, tokens: Sequence[str] = (MARK,), **config: Any) -> Path:
    """A small tokenizer with more tokens, and a template, or several by their names."""
    made = make_tokenizer(path, {"miles_chat_family": None, **config})
    tokenizer = Tokenizer.from_file(str(made / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in tokens])
    tokenizer.save(str(made / "tokenizer.json"))
    settings = json.loads((made / "tokenizer_config.json").read_text())
    settings |= {"chat_template": template, "tokenizer_class": "PreTrainedTokenizerFast"}
    (made / "tokenizer_config.json").write_text(json.dumps(settings))
    return made


def written(last: str, **places: str) -> str:
    """The template with texts at the places of its answers; `last` ends an answer with calls."""
    text = TEMPLATE.replace("LAST", last)
    for place in PLACES:
        text = text.replace(place, places.get(place, "/" if place != "BEFORE" else ""))
    return text


def user(text: str = "q") -> dict[str, Any]:
    return {"role": "user", "content": text}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def answer(content: str = "a", calls: int = 0) -> dict[str, Any]:
    made = [
        {"id": f"call0000{i}", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
        for i in range(calls)
    ]
    return {"role": "assistant", "content": content, **({"tool_calls": made} if made else {})}


def result(call: int = 0) -> dict[str, Any]:
    return {"role": "tool", "content": "r\n", "tool_call_id": f"call0000{call}", "name": "bash"}


def check_exact(family: ChatFamily, talk: list[dict[str, Any]], tools: Any = None) -> None:
    """The pieces of a conversation are what its template gives, wherever the model is asked."""
    template, ids = OwnTemplate(family.tokenizer), []
    for end in range(1, len(talk) + 1):
        if end < len(talk) and talk[end]["role"] != "assistant":
            continue
        if talk[end - 1]["role"] == "assistant":
            continue
        whole = template.render(parse_messages(talk[:end]), tools or (), True)
        assert family.render_text(talk[:end], tools) == whole
        start = max((i for i in range(end) if talk[i]["role"] == "assistant"), default=None)
        if start is None:
            ids = family.render_prompt(talk[:end], tools)
        else:
            output = family.render_output(talk[start])
            ids += output + family.continue_turn(
                talk[: start + 1], output, talk[start + 1 : end], tools
            )
        assert family.tokenizer.decode(ids) == whole


@pytest.mark.parametrize("places", list(product((False, True), repeat=len(PLACES))), ids=str)
def test_a_token_inside_of_an_answer_is_no_stop(places: tuple[bool, ...], tmp_path: Path) -> None:
    marked = {place: MARK for place, here in zip(PLACES, places, strict=True) if here}
    family = load_family(directory(tmp_path, written("<|im_end|>", **marked)))
    assert isinstance(family.notation, TemplateNotation)
    assert [family.tokenizer.token_of(i) for i in family.stop_token_ids] == ["<|im_end|>"]
    for calls in (1, 2):
        said = answer("I look.", calls)
        ids = family.render_output(said)
        assert [i in family.stop_token_ids for i in ids] == [False] * (len(ids) - 1) + [True]
        check_exact(family, [user(), said, *map(result, range(calls)), answer(), user()], [BASH])
    assert verify(family, number=10).ok


@pytest.mark.parametrize("place", PLACES)
def test_a_token_that_ends_calls_and_stands_inside_of_answers_is_refused(
    place: str, tmp_path: Path
) -> None:
    made = directory(tmp_path, written(MARK, **{place: MARK}))
    with pytest.raises(UserError, match="so that an engine would stop there"):
        load_family(made, "template")


@pytest.mark.parametrize("place", PLACES)
def test_the_end_that_a_checkpoint_names_must_not_stand_inside_either(
    place: str, tmp_path: Path
) -> None:
    template = written("<|im_end|>", **{place: MARK})
    with pytest.raises(UserError, match="so that an engine would stop there"):
        load_family(directory(tmp_path, template, eos_token=MARK), "template")
    made = directory(tmp_path / "generation", template)
    mark = ChatTokenizer(made).id_of(MARK)
    (made / "generation_config.json").write_text(json.dumps({"eos_token_id": [mark]}))
    with pytest.raises(UserError, match="so that an engine would stop there"):
        load_family(made, "template")


def test_calls_may_have_an_end_of_their_own(tmp_path: Path) -> None:
    family = load_family(directory(tmp_path, written(MARK)))
    assert family.notation.stops == ("<|im_end|>", MARK)
    check_exact(family, [user(), answer("", 2), result(0), result(1)], [BASH])
    assert verify(family, number=10).ok


def test_an_answer_has_to_end_with_a_token(tmp_path: Path) -> None:
    for number, last in enumerate(("over", f"{MARK}over", "")):
        with pytest.raises(UserError, match="no token of its own at the end"):
            load_family(directory(tmp_path / str(number), written(last)), "template")


@pytest.mark.parametrize("always", [False, True])
def test_what_ends_the_text_alone_is_no_part_of_an_answer(always: bool, tmp_path: Path) -> None:
    """As Phi-3, whose text ends with another token; as Llama 3, which always asks for more."""
    more = "" if always else "{% else %}{{ eos_token }}"
    template = PLAIN.removesuffix("{% endif %}") + more + "{% endif %}"
    if always:
        template = template.replace("{% if add_generation_prompt %}", "{% if true %}")
    family = load_family(directory(tmp_path, template, eos_token="<|endoftext|>"), "template")
    assert family.notation.stops == ("<|im_end|>",)
    for talk in MIXED:
        check_exact(family, talk)
    assert verify(family, number=10).ok


def test_words_that_nothing_reads_are_refused(tmp_path: Path) -> None:
    framed = TEMPLATE.replace("{{ message.content }}", "</mind>{{ message.content }}")
    with pytest.raises(UserError, match="which no known notation reads"):
        load_family(directory(tmp_path, framed.replace("LAST", "<|im_end|>")), "template")


PLAIN = TEMPLATE.replace(ANSWER, "{{ message.content + '<|im_end|>\n' }}")
ASKS = "{{ '<|im_start|>assistant\n' }}"
# What a generation prompt may depend on.
CONDITIONS = {
    "in the system message": "'/no_think' in messages[0].content",
    "ends the system message": "messages[0].content.endswith('/no_think')",
    "begins a message": "(messages | selectattr('role', 'equalto', 'user') | map("
    "attribute='content') | join(' ')).startswith('/no_think')",
    "is the last message": "messages[-1].content == '/no_think'",
    "in a result": "messages[-1].role == 'tool' and '/no_think' in messages[-1].content",
    "how many messages": "messages | length > 3",
    "tools": "tools",
    "a late system message": "messages[-1].role == 'system'",
    "an earlier answer": "messages | selectattr('role', 'equalto', 'assistant') | list | length",
}
MIXED = [
    [system("Be kind. /no_think"), user(), answer(), user("more"), answer(), user("/no_think")],
    [system("Be kind."), user("/no_think"), answer(), system("/no_think"), answer(), user()],
    [user(), answer(), system("reminder"), answer(), system("/no_think please")],
    [user(), answer(), {**result(), "content": "/no_think"}],
]


@pytest.mark.parametrize("where", CONDITIONS)
def test_a_generation_prompt_may_depend_on_anything(where: str, tmp_path: Path) -> None:
    chosen = ASKS + f"{{% if {CONDITIONS[where]} %}}{{{{ '<think>\n\n</think>\n' }}}}{{% endif %}}"
    shows_tools = "{{ tools | tojson if tools else '' }}" + PLAIN
    # Later the answer is rendered without the empty reasoning that it was sampled after.
    dropping = directory(tmp_path / "dropping", shows_tools.replace(ASKS, chosen))
    with pytest.raises(UserError, match="no chat family fits"):
        load_family(dropping)
    # Whatever this one chooses, it writes the same.
    chosen = ASKS.replace("\n", f"' + ('\n' if {CONDITIONS[where]} else '\n') + '")
    family = load_family(directory(tmp_path / "same", shows_tools.replace(ASKS, chosen)))
    for talk in MIXED:
        check_exact(family, talk, [BASH])


@pytest.mark.parametrize("where", CONDITIONS)
def test_a_switch_that_a_family_does_not_know_is_found(where: str, tmp_path: Path) -> None:
    if "result" in where:
        pytest.skip("a template without tools is not asked about their results")
    chosen = ASKS + f"{{% if {CONDITIONS[where]} %}}{{{{ '<think>\n\n</think>\n' }}}}{{% endif %}}"
    made = directory(tmp_path, PLAIN.replace(ASKS, chosen))
    with pytest.raises(UserError, match="no chat family fits"):
        load_family(made)
    forced = verify(load_family(made, "chatml"), number=20)
    assert "own template" in [check.name for check in forced.checks if not check.ok]


def test_a_switch_in_messages_reaches_prompts_and_answers(tmp_path: Path) -> None:
    """As SmolLM3: a switch in the system message empties the reasoning of all answers."""
    off = "'/no_think' in messages[0].content"
    empty = f"{{% if {off} %}}{{{{ '<think>\n\n</think>\n' }}}}{{% endif %}}"
    template = PLAIN.replace(ASKS, ASKS + empty).replace(
        "{% if message.role == 'assistant' %}", f"{{% if message.role == 'assistant' %}}{empty}"
    )
    family = load_family(directory(tmp_path, template))
    assert family.name == "template" and not family.notation.local
    for talk in MIXED:
        check_exact(family, talk)
    assert verify(family, number=10).ok


@pytest.mark.parametrize("role", ["system", "user", "tool"])
def test_the_prompt_after_any_last_message(role: str, tmp_path: Path) -> None:
    """The first system message is written in another way than later ones, as Granite's is."""
    first = "{% if loop.first and message.role == 'system' %}{{ 'rules: ' + message.content }}"
    turn = "{{ '<|im_start|>' +"
    template = PLAIN.replace(turn, f"{first}{{% else %}}{turn}")
    template = template.replace("{% endfor %}", "{% endif %}{% endfor %}")
    more = "(messages | length > 1 or messages[0].role != 'system')"
    template = template.replace("add_generation_prompt", f"add_generation_prompt and {more}")
    family = load_family(directory(tmp_path, template))
    assert family.name == "template"
    last = {"role": role, "content": "reminder"}
    for talk in ([user(), last], [user(), answer(), last], [system("s"), user(), answer(), last]):
        check_exact(family, talk)
        assert family.render_text(talk).endswith("<|im_start|>assistant\n")
    assert verify(family, number=10).ok


def test_the_texts_that_a_template_looks_for_are_found(tmp_path: Path) -> None:
    source = (
        "{% set s = messages[0].content %}{% if '/think' in s or s.endswith('/off') or "
        "s == 'exact' or s.split('cut')[0] or s.replace('a b', '') or messages[0].role == 'user' "
        "or s in ['one of', 'two'] %}{{ 'plain text' }}{% endif %}"
    )
    found = literals(OwnTemplate(ChatTokenizer(directory(tmp_path, source))))
    assert set(found) == {"/think", "/off", "exact", "cut", "a b", "one of", "two"}


TOOL_USE = (
    "{{ 'tools: ' + (tools | tojson) + '\n' }}"
    + TEMPLATE.replace("LAST", "<|im_end|>").replace("THOUGHT", "/").replace("BEFORE", "")
).replace("AFTER", MARK)
TALKS = [
    ([user()], None),
    ([user()], [BASH]),
    ([system("s"), user(), answer(), user("more\n")], None),
    ([system("s"), user(), answer(), user("more\n")], [BASH]),
    ([user(), answer("I look.", 2), result(0), result(1)], [BASH]),
]


def named(path: Path, templates: dict[str, str], form: str) -> Path:
    """A checkpoint with named templates, in one of the forms that these have had."""
    listed = [{"name": name, "template": text} for name, text in templates.items()]
    made = directory(path, listed if form == "list" else "{{ 'of no use' }}")
    if form == "files":
        more = made / "additional_chat_templates"
        more.mkdir()
        for name, text in templates.items():
            file = made / "chat_template.jinja" if name == "default" else more / f"{name}.jinja"
            file.write_text(text)
    return made


@pytest.mark.parametrize("form", ["list", "files"])
@pytest.mark.parametrize("names", ["default", "default tool_use", "tool_use", "default rag"])
def test_the_template_is_the_one_that_transformers_renders(
    names: str, form: str, tmp_path: Path
) -> None:
    texts = {"default": PLAIN, "tool_use": TOOL_USE, "rag": "{{ 'documents' }}"}
    made = named(tmp_path, {name: texts[name] for name in names.split()}, form)
    theirs, template = AutoTokenizer.from_pretrained(made), OwnTemplate(ChatTokenizer(made))
    for talk, tools in TALKS:
        if tools is None and "default" not in names:
            with pytest.raises(MessageError, match="with tools only"):
                template.render(parse_messages(talk))
            continue
        said = theirs.apply_chat_template(
            [m | {"tool_calls": _plain(m)} if "tool_calls" in m else m for m in talk],
            tools=tools, add_generation_prompt=True, tokenize=False,
        )  # fmt: skip
        assert template.render(parse_messages(talk), tools or (), True) == said


def _plain(message: dict[str, Any]) -> list[Any]:
    """Calls with their arguments as objects, which templates want."""
    return [
        call | {"function": {**call["function"],
                             "arguments": json.loads(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]  # fmt: skip


@pytest.mark.parametrize("form", ["list", "files"])
def test_a_checkpoint_with_a_template_for_tools(form: str, tmp_path: Path) -> None:
    made = named(tmp_path, {"default": PLAIN, "tool_use": TOOL_USE}, form)
    family = load_family(made)
    assert family.name == "template", "the tools are not written as those of chatml are"
    for talk, tools in TALKS:
        check_exact(family, talk, tools)
    assert family.notation.stops == ("<|im_end|>",)
    # The template for requests without tools leaves calls out.
    with pytest.raises(MessageError, match="send the tools with every request"):
        family.render_text([user(), answer("", 1), result()])
    report = verify(family, number=10)
    compared = next(check for check in report.checks if check.name == "own template")
    assert report.ok and compared.passed and not compared.excused
    # A family that renders tools in its own way is seen.
    forced = verify(load_family(made, "chatml"), number=10)
    assert [check.name for check in forced.checks if not check.ok] == ["own template"]


def test_named_templates_without_a_default_are_refused(tmp_path: Path) -> None:
    made = named(tmp_path, {"rag": PLAIN, "plain": PLAIN}, "list")
    for name in ("auto", "template"):
        with pytest.raises(UserError, match=r"\(plain, rag\) none is `default`"):
            load_family(made, name)


NEVER = [
    # Only a stand-in for the past is rewritten, or refused.
    "{% if messages | length == 3 and messages[0].content == 'question' %}x{% endif %}" + PLAIN,
    "{% if messages | length == 3 and messages[0].content == 'question' %}"
    "{{ raise_exception('too short') }}{% endif %}" + PLAIN,
    PLAIN.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant\n<think>'"),
    "{% set n = messages | length %}{{ 7 // (n - 3) }}" + PLAIN,
    "{{ messages | length }}" + PLAIN,
    "{% if messages[-1].role != 'user' %}{{ raise_exception('no') }}{% endif %}" + PLAIN,
]


@pytest.mark.parametrize("number", range(len(NEVER)))
def test_whatever_a_template_does_there_is_a_family_or_a_reason(
    number: int, tmp_path: Path
) -> None:
    family_or_reason(directory(tmp_path, NEVER[number]))


def family_or_reason(made: Path) -> None:
    for name in ("auto", "template"):
        try:
            family = load_family(made, name)
        except UserError as error:
            assert error.fix
        else:
            report = verify(family, number=10)
            assert report.ok, report.to_json()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["deepseek_r1_distill_training", "gemma4", "gemma4_v2", "lfm2_2_5", "lfm2_v2", "phi3",
     "cohere2_training", "idefics3", "qwen3_vl", "nemotron_3_nano_training"],
)  # fmt: skip
def test_public_templates_are_proven_or_refused(name: str, tmp_path: Path) -> None:
    text = template_text(f"trl/{name}")
    tokens = ["<|tool_call_start|>", "<|tool_call_end|>", "<turn|>", "<|turn>", "<tool_call|>",
              "<|tool_call>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<|end|>",
              "<|user|>", "<|assistant|>", "<|END_OF_TURN_TOKEN|>"]  # fmt: skip
    family_or_reason(directory(tmp_path, text, tokens))
