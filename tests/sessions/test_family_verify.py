"""`miles sessions verify`: what it prints, and that each of its checks can fail."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from family_cases import CHATML
from session_helpers import make_tokenizer

from miles_cli.main import dispatch, main
from miles_core.sessions.families import ChatFamily, load_family
from miles_core.sessions.families.notation import Tools
from miles_core.sessions.families.qwen import Qwen3
from miles_core.sessions.messages import Message, MessageError
from miles_core.sessions.tokens import ChatTokenizer
from miles_core.sessions.verify.check import verify
from miles_core.sessions.verify.corpus import Conversation, Writer
from miles_core.sessions.verify.report import Report


class Rewrites(Qwen3):
    """Drops old reasoning, as the checkpoints' own template does."""

    def conversation(self, messages: Sequence[Message], tools: Tools) -> str:
        last = max((i for i, m in enumerate(messages) if m.role == "user"), default=-1)
        kept = [
            dataclasses.replace(m, reasoning_content="") if i < last else m
            for i, m in enumerate(messages)
        ]
        return super().conversation(kept, tools)


class NoEnd(Qwen3):
    """Does not close an answer that was cut off."""

    def continuation(
        self, previous: Sequence[Message], stop: str | None, new: Sequence[Message], tools: Tools
    ) -> str:
        return super().continuation(previous, "<|im_end|>", new, tools)


class Junction(Qwen3):
    """Forgets the line break between turns."""

    def continuation(
        self, previous: Sequence[Message], stop: str | None, new: Sequence[Message], tools: Tools
    ) -> str:
        return super().continuation(previous, stop, new, tools).replace("\n", "", 1)


class Strips(Qwen3):
    """Reads answers in small letters."""

    def parse(self, text: str, tools: Tools = ()) -> Message:
        return super().parse(text.lower(), tools)


class Hasty(Qwen3):
    """Sends what may yet become a call."""

    def settled(self, text: str) -> tuple[str, str]:
        return "", text


class Refuses(Qwen3):
    """Has a form for nothing."""

    def conversation(self, messages: Sequence[Message], tools: Tools) -> str:
        raise MessageError("never")


class OtherWords(Qwen3):
    """Calls the user by another name than the template does."""

    exceptions: Mapping[str, str] = {}

    def conversation(self, messages: Sequence[Message], tools: Tools) -> str:
        return super().conversation(messages, tools).replace("user\n", "User\n")


class LooseStop(Qwen3):
    """Stops at something that is no token of its own."""

    stops = ("<|im_end|>", "e")


@pytest.mark.parametrize(
    ("broken", "failing"),
    [
        (Rewrites(), "append-only"),
        (Junction(), "ids"),
        (NoEnd(), "truncated"),
        (Strips(), "parsed"),
        (Hasty(), "streamed"),
        (Refuses(), "accepted"),
        (OtherWords(), "own template"),
        (LooseStop(), "stop tokens"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Qwen3) else value,
)
def test_each_check_fails_where_it_should(broken: Qwen3, failing: str, tmp_path: Path) -> None:
    tokenizer = ChatTokenizer(make_tokenizer(tmp_path, {"chat_template": CHATML}))
    stops = tuple(tokenizer.id_of(stop) or 0 for stop in broken.stops)
    report = verify(ChatFamily(tokenizer, broken, stops), number=30)
    assert not report.ok and failing in failed(report)
    first = next(check.first for check in report.checks if check.name == failing)
    assert failing == "accepted" or first is not None


def failed(report: Report) -> list[str]:
    return [check.name for check in report.checks if not check.ok]


def test_a_sample_with_other_ids_is_seen(tokenizer_dir: Path, monkeypatch: Any) -> None:
    from miles_core.sessions.verify import episode

    honest = episode.play

    def forged(*args: Any) -> Any:
        samples = honest(*args)
        span = samples.samples[0].turns[0]
        samples.samples[0].tokens[span.start] += 1
        return samples

    monkeypatch.setattr(episode, "play", forged)
    assert failed(verify(load_family(tokenizer_dir), number=5)) == ["sampled"]


def test_another_parser_that_reads_something_else_is_seen(tokenizer_dir: Path) -> None:
    family = load_family(tokenizer_dir)
    same = verify(family, number=5, theirs=family.notation.parse)
    assert same.ok and next(c.passed for c in same.checks if c.name == "sglang") > 5
    assert failed(verify(family, number=5, theirs=Strips().parse)) == ["sglang"]


def test_the_same_seed_draws_the_same(tokenizer_dir: Path) -> None:
    assert Writer(5).conversations(12) == Writer(5).conversations(12) != Writer(6).conversations(12)
    reports = [verify(load_family(tokenizer_dir), 5, 12).to_json() | {"seconds": 0} for _ in "ab"]
    assert reports[0] == reports[1]


def test_the_corpus_holds_what_it_says() -> None:
    talks = Writer(0).conversations(200)
    messages = [m for talk in talks for m in talk.messages]
    answers = [m for m in messages if m.role == "assistant"]
    assert any(len(m.tool_calls) > 1 for m in answers) and any(m.reasoning_content for m in answers)
    assert any(not m.content and not m.tool_calls for m in answers)
    assert any(not m.content for m in messages if m.role == "user")
    assert any(talk.tools for talk in talks) and any(not talk.tools for talk in talks)
    assert any(m.role == "system" for talk in talks for m in talk.messages[1:])
    assert any("\u0301" in m.content for m in messages) and any(
        "\x1b" in m.content for m in messages
    )
    assert max(len(talk.messages) for talk in talks) > 20


def test_a_conversation_without_an_answer_is_compared_with_the_template(tmp_path: Path) -> None:
    directory = make_tokenizer(tmp_path, {"miles_chat_family": None, "chat_template": CHATML})
    talk = Conversation((Message("user", "q"),))
    assert verify(load_family(directory), conversations=[talk]).ok
    report = verify(load_family(directory, "qwen2.5"), conversations=[talk])
    assert failed(report) == ["own template"]


def test_the_table(tokenizer_dir: Path, capsys: Any) -> None:
    command = ["sessions", "verify", "--tokenizer", str(tokenizer_dir), "--conversations", "10"]
    assert dispatch(command) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"family qwen3 over {tokenizer_dir}")
    assert "append-only   held" in out
    # There is no template to compare with, and no other parser.
    assert "9 of 9 checks hold, 2 had nothing to check" in out
    assert "note: the checkpoint has no template of its own" in out


def test_a_wrong_family_is_told_with_its_message(tmp_path: Path, capsys: Any) -> None:
    directory = make_tokenizer(tmp_path, {"miles_chat_family": None, "chat_template": CHATML})
    command = ["sessions", "verify", "--tokenizer", str(directory), "--conversations", "5"]
    assert dispatch([*command, "--chat-family", "qwen2.5"]) == 1
    out = capsys.readouterr().out
    assert "own template  failed" in out and "first failure: conversation" in out
    assert dispatch([*command, "--json", "--chat-family", "qwen2.5"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["family"] == "qwen2.5" and not said["ok"]
    check = next(check for check in said["checks"] if check["name"] == "own template")
    assert check["failed"] and check["first"]["messages"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--chat-family", "qwen33"], "Did you mean qwen3"),
        (["--conversations", "0"], "whole number"),
        (["--tokeniser", "x"], "Did you mean --tokenizer"),
    ],
)
def test_mistakes(more: list[str], said: str, tokenizer_dir: Path, capsys: Any) -> None:
    assert main(["sessions", "verify", "--tokenizer", str(tokenizer_dir), *more]) == 2
    assert said in capsys.readouterr().err
