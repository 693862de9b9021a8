"""The parts of one turn, in process: milliseconds of CPU against the length of the history."""

from __future__ import annotations

import argparse
import ast
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from miles_core.sessions.chat_answer import completion
from miles_core.sessions.chat_request import parse_request
from miles_core.sessions.engine_call import EngineRequest
from miles_core.sessions.families import load_family
from miles_core.sessions.generation import Generation, read_generation
from miles_core.sessions.journal import Journal
from miles_core.sessions.json_body import read_json
from miles_core.sessions.protocol import SessionRequest
from miles_core.sessions.session import Match, Place, Session
from miles_core.sessions.tree import Turn

TURNS = (8, 32, 128)
PROMPT_TOKENS = OUTPUT_TOKENS = 64
FRAME_TOKENS = 16
"""Of a user's message, about: its number, its role, its end, and the generation prompt."""


@dataclass(frozen=True)
class Corpus:
    """Texts of the right length under one tokenizer."""

    directory: Path
    user_texts: list[str]
    answer: str
    output_ids: list[int]


def make_corpus(scratch: Path, directory: Path | None) -> Corpus:
    """Texts over a given checkpoint's tokenizer, or over a byte-level BPE made of source code."""
    source = "\n".join(Path(module.__file__ or "").read_text() for module in (ast, argparse, json))
    if directory is None:
        directory = scratch / "tokenizer"
        directory.mkdir()
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=4096, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator([source], trainer)
        tokenizer.save(str(directory / "tokenizer.json"))
        config = {"eos_token": "<|im_end|>", "miles_chat_family": "qwen3"}
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
    family = load_family(directory)
    ids = family.tokenizer.encode(source)
    size = PROMPT_TOKENS - FRAME_TOKENS
    slices = [ids[at : at + size] for at in range(0, 97 * size, size)]
    texts = [family.tokenizer.decode(part) for part in slices]
    answer = family.tokenizer.decode(ids[-OUTPUT_TOKENS + 1 :])
    output_ids = [*ids[-OUTPUT_TOKENS + 1 :], family.end_of_turn_id]
    return Corpus(directory, texts, answer, output_ids)


def timed_ms(step: Callable[[], Any], repeats: int) -> float:
    """Median milliseconds of CPU of one call."""
    found = []
    for _ in range(10):  # warm-up
        step()
    for _ in range(repeats):
        began = time.process_time_ns()
        step()
        found.append((time.process_time_ns() - began) / 1e6)
    return statistics.median(found)


class Conversation:
    """A session with a history, and the request of its next turn as bytes."""

    def __init__(self, corpus: Corpus, turns: int, scratch: Path) -> None:
        self.family = load_family(corpus.directory)
        self.session = Session(SessionRequest(max_seq_len=1_000_000))
        self.journal = Journal(scratch / f"{turns}.session")
        self.journal.create(self.session.request)
        ids = corpus.output_ids
        pairs = [[-1.03125, token, None] for token in ids]
        meta = {"finish_reason": {"type": "stop"}, "weight_version": "1"}
        meta["output_token_logprobs"] = pairs
        self.answered = orjson.dumps({"output_ids": ids, "meta_info": meta})
        history: list[dict[str, str]] = []
        for number in range(turns):
            text = f"0 {number} {corpus.user_texts[number % len(corpus.user_texts)]}"
            history.append({"role": "user", "content": text})
            self.body = orjson.dumps({"model": "policy", "messages": history})
            if number < turns - 1:
                place = self.match().render(self.family)
                self.session.tree.add(self.turn(place, self.generation()))
                history.append({"role": "assistant", "content": corpus.answer})

    def match(self) -> Match:
        request = parse_request(read_json(self.body), len(self.body))
        return self.session.match(request.messages, request.tools)

    def generation(self) -> Generation:
        return read_generation(orjson.loads(self.answered), 1_000_000)

    def turn(self, place: Place, generation: Generation) -> Turn:
        """The answer to a request, parsed; as `ChatService` records it."""
        answer = self.family.parse_message(generation.output_ids.tolist(), ())
        return Turn(
            index=len(self.session.tree.turns),
            parent=place.parent,
            tools_key=place.tools_key,
            new=place.new,
            answer=answer,
            prompt_ids=place.prompt_ids,
            output_ids=generation.output_ids,
            logprobs=generation.logprobs,
            length=place.length + len(generation.output_ids),
            rid="0" * 32,
            versions=generation.versions,
            finish_reason=generation.finish_reason,
            started=self.session.next_event(),
            ended=self.session.next_event(),
        )


def part_costs(talk: Conversation, repeats: int) -> dict[str, float]:
    """Milliseconds of CPU of each part of the next turn."""
    family = talk.family
    request = parse_request(read_json(talk.body), len(talk.body))
    match = talk.match()
    place = match.render(family)
    suffix = family.tokenizer.decode(place.prompt_ids.tolist())
    generation = talk.generation()
    used = (place.length, len(generation.output_ids))

    def proxy() -> None:
        EngineRequest("0" * 32, "0" * 32, place.input_ids(), {"temperature": 1.0}).body(False)
        talk.generation()

    def record() -> None:
        turn = talk.turn(place, generation)
        talk.journal.append(turn)
        orjson.dumps(completion(request, turn.rid, turn.answer, "stop", used, None))

    steps: dict[str, Callable[[], Any]] = {
        "parse": lambda: parse_request(read_json(talk.body), len(talk.body)),
        "match": talk.match,
        "render": lambda: match.render(family),
        "tokenise": lambda: family.tokenizer.encode(suffix),
        "proxy": proxy,
        "record": record,
    }
    found = {name: timed_ms(step, repeats) for name, step in steps.items()}
    found["match"] -= found["parse"]
    found["render"] -= found["tokenise"]
    return found


def turn_costs(corpus: Corpus, scratch: Path, repeats: int) -> dict[str, dict[str, float]]:
    """For each part: ms of CPU at each of `TURNS`, the ratio of last to first, us per KB.

    The last is the growth from the first to the last of `TURNS` over that of the request's size.
    """
    talks = {turns: Conversation(corpus, turns, scratch) for turns in TURNS}
    costs = {turns: part_costs(talk, repeats) for turns, talk in talks.items()}
    kilobytes = (len(talks[TURNS[-1]].body) - len(talks[TURNS[0]].body)) / 1000
    report: dict[str, dict[str, float]] = {
        "request KB": {f"turn {turns}": round(len(t.body) / 1000, 1) for turns, t in talks.items()}
    }
    for turns in costs:
        costs[turns]["render + tokenise"] = costs[turns]["render"] + costs[turns]["tokenise"]
        parts = ("parse", "match", "render", "tokenise", "proxy", "record")
        costs[turns]["all"] = sum(costs[turns][part] for part in parts)
    for part in costs[TURNS[0]]:
        first, last = costs[TURNS[0]][part], costs[TURNS[-1]][part]
        report[part] = {f"turn {turns} ms": round(costs[turns][part], 4) for turns in TURNS}
        report[part]["ratio"] = round(last / first, 2) if first else 0.0
        report[part]["us per KB"] = round(1000 * (last - first) / kilobytes, 2)
    return report
