"""Demonstrations hold the ids that a session renders and the solutions of the tasks."""

from __future__ import annotations

import random
import shutil
from itertools import groupby

import pytest

from miles_core.errors import UserError
from miles_core.modelinit.demos import (
    SUBMIT,
    DemoMaker,
    Pattern,
    bash_call,
    called_command,
    fill,
    read_patterns,
    word_maker,
)


def learned_parts(demo):
    """The runs of tokens with mask 1."""
    return [
        [token for token, _ in run]
        for mask, run in groupby(zip(demo.tokens, demo.loss_mask, strict=True), lambda x: x[1])
        if mask
    ]


def test_patterns_are_those_of_the_tasks(patterns):
    found, names = patterns
    assert Pattern("Write {0} to {1}.txt", "echo {0} > {1}.txt", 2) in found
    assert len(found) == 10 and len(names) >= 100


def test_a_demonstration_is_the_conversation_as_a_session_renders_it(maker, family, prompts):
    seen = prompts.observed(0, "")
    opening = prompts.opening("Write mofe to kiba.txt")
    demo = maker.render("Write mofe to kiba.txt", "echo mofe > kiba.txt", seen, learn=True)
    first, second = learned_parts(demo)
    prompt = family.render_prompt(opening)
    # What a session does: record the sampled ids, parse them, and render what follows them.
    answer = family.parse_output(first)
    assert called_command(answer) == "echo mofe > kiba.txt"
    suffix = family.continue_turn([*opening, answer], first, [seen])
    assert demo.tokens == [*prompt, *first, *suffix, *second]
    assert called_command(family.parse_output(second)) == SUBMIT
    assert first[-1] == second[-1] == family.end_of_turn_id
    whole = family.render_prompt([*opening, answer, seen, bash_call(SUBMIT)], None, False)
    assert whole[: len(demo.tokens)] == demo.tokens


def test_a_slip_is_seen_and_not_learned(maker, family):
    demos = [maker.demo() for _ in range(60)]
    slips = [demo for demo in demos if len(learned_parts(demo)) == 1]
    assert 3 <= len(slips) <= 25
    for demo in slips:
        assert called_command(family.parse_output(learned_parts(demo)[0])) == SUBMIT
    texts = [family.tokenizer.decode(demo.tokens) for demo in slips]
    assert any("No such file" in text for text in texts)


def test_same_seed_same_demonstrations(family, prompts, patterns):
    first, again, other = (DemoMaker(family, prompts, *patterns, seed=s) for s in (1, 1, 2))
    drawn = [[m.demo() for _ in range(20)] for m in (first, again, other)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_no_demonstration_shows_a_task(patterns):
    found, taken = patterns
    word = word_maker(random.Random(0), taken)
    for _ in range(3000):
        assert word() not in taken


def test_filling_keeps_the_pattern():
    pattern = Pattern("Print {{{0}}} of {1}", "echo {{{0}}} {1} {0}", 2)
    words = iter(["ab", "cd"])
    assert fill(pattern, lambda: next(words)) == ("Print {ab} of cd", "echo {ab} cd ab")


def test_a_solution_of_two_commands_is_refused(tmp_path):
    task = tmp_path / "tasks" / "two"
    (task / "solution").mkdir(parents=True)
    (task / "task.toml").write_text('[metadata]\nnames = ["ab"]\n')
    (task / "instruction.md").write_text("Make ab")
    (task / "solution" / "solve.sh").write_text("mkdir ab\ncd ab\n")
    with pytest.raises(UserError, match="2 commands"):
        read_patterns(tmp_path / "tasks")
    shutil.rmtree(task)
    with pytest.raises(UserError, match="can be demonstrated"):
        read_patterns(tmp_path / "tasks")


@pytest.mark.parametrize(
    "message",
    [
        {"content": "echo hi"},
        {"content": "well", "tool_calls": [{"function": {"name": "bash", "arguments": "{}"}}]},
        {"tool_calls": [{"function": {"name": "bash", "arguments": '{"cmd": "ls"}'}}]},
        {"tool_calls": [{"function": {"name": "sh", "arguments": '{"command": "ls"}'}}]},
        {"tool_calls": [{"function": {"name": "bash", "arguments": "{"}}]},
    ],
)
def test_other_answers_have_no_command(message):
    assert called_command(message) is None
