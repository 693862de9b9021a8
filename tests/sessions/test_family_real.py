"""Each family over a real tokenizer and a real template: it is found, exact, and append-only."""

from __future__ import annotations

import pytest
from family_cases import CASES, SLOW_CASES, TOOLS, Case, conversations
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from real_tokenizers import tokenizer_dir

from miles_core.errors import UserError
from miles_core.sessions.families import load_family
from miles_core.sessions.families.jinja import OwnTemplate
from miles_core.sessions.families.own_template import TemplateNotation
from miles_core.sessions.messages import Message, ToolCall
from miles_core.sessions.verify.check import verify

EVERY = [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW_CASES)]


@pytest.mark.parametrize("case", EVERY, ids=str)
def test_the_family_is_found(case: Case) -> None:
    assert case.load().name == case.family


@pytest.mark.parametrize("case", EVERY, ids=str)
def test_generated_conversations(case: Case) -> None:
    report = verify(case.load(), seed=3, number=30)
    assert report.ok, report.to_json()
    compared = next(check for check in report.checks if check.name == "own template")
    assert compared.passed >= 10


@pytest.mark.parametrize("case", EVERY, ids=str)
def test_random_conversations(case: Case) -> None:
    """Trained ids are the sampled ids, and the whole is the template's but for the exceptions."""
    family = case.load()

    @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def run(data: st.DataObject) -> None:
        talk = data.draw(conversations(family.notation.reasoning))
        report = verify(family, data.draw(st.integers(0, 99)), conversations=[talk])
        checks = [check for check in report.checks if check.name != "accepted"]
        assert all(check.ok for check in checks), [c.first for c in checks if c.first]

    run()


@pytest.mark.parametrize(
    ("tokenizer", "name"),
    [
        ("gptoss", "gpt-oss"),
        ("llama3_1", "llama3.0"),
        ("glm", "glm45"),
        ("deepseek_v3", "deepseek-v3"),
        ("qwen3", "chatml"),
    ],
)
def test_without_a_template_the_tokens_tell(tokenizer: str, name: str) -> None:
    assert load_family(tokenizer_dir(tokenizer, "")).name == name


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("trl/nemotron_3_nano", "rewrites earlier messages, at message"),
        ("trl/phi3", "ends an answer of words with"),
    ],
)
def test_tokens_of_qwen_with_another_notation_are_refused(template: str, said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        load_family(tokenizer_dir("qwen3", template))
    assert "tried: qwen3, " in str(caught.value) and "nearest: " in str(caught.value)


def test_the_own_template_of_qwen3_rewrites_old_reasoning() -> None:
    directory = tokenizer_dir("qwen3", "trl/qwen3")
    with pytest.raises(UserError, match="rewrites earlier messages") as caught:
        load_family(directory, "template")
    assert "assistant, reasoning" in str(caught.value)


@pytest.mark.parametrize(
    "case",
    [
        case
        for case in CASES
        if case.family in ("qwen3", "qwen3-thinking", "qwen3.5", "qwen3.6", "glm45")
    ],
    ids=str,
)
def test_reasoning_that_a_client_sends_in_the_content(case: Case) -> None:
    """Few-shot answers, and those of clients that know no reasoning: as the template has them."""
    family, template = case.load(), OwnTemplate(case.load().tokenizer)
    call = ToolCall("bash", {"command": "ls"}, "call00000")
    result = Message("tool", "one\n", (), "", "call00000", "bash")
    for content in (
        "<think>\nthought\n</think>\n\nI look.",
        "thought</think>I look.",
        "I </think>",
    ):
        talk = [Message("user", "q"), Message("assistant", content, (call,)), result]
        assert family.render_text(talk, TOOLS) == template.render(talk, TOOLS, True)


def test_a_template_for_training_is_append_only() -> None:
    family = load_family(tokenizer_dir("qwen3", "trl/qwen3_training"))
    assert isinstance(family.notation, TemplateNotation) and family.notation.reader is not None
    assert family.notation.reader.name == "qwen3" and family.notation.reasoning
    assert verify(family, seed=2, number=20).ok


def test_gemma_has_no_form_for_tools() -> None:
    family = load_family(tokenizer_dir("gemma3"))
    assert family.name == "template" and family.notation.local
    report = verify(family, seed=1, number=30)
    accepted = report.checks[0]
    assert report.ok and accepted.passed and any("role" in why for why in accepted.excused)
