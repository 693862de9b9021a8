"""Plays a conversation as a session does, with answers that no tokenizer would have written."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from miles_core.sessions.families.family import ChatFamily, openai_message
from miles_core.sessions.journal import Journal
from miles_core.sessions.messages import Message
from miles_core.sessions.protocol import SessionRequest, SessionSamples
from miles_core.sessions.samples import Snapshot, cut_samples
from miles_core.sessions.session import Session
from miles_core.sessions.tree import Turn
from miles_core.sessions.verify.corpus import Conversation
from miles_core.sessions.verify.report import Check, Where


def split_ids(family: ChatFamily, text: str, rng: random.Random) -> list[int]:
    """Ids of `text` that were put together from pieces, as a model may sample them."""
    cuts = sorted({0, len(text), *(rng.randrange(len(text) + 1) for _ in range(4))})
    pieces = [text[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]
    return [i for piece in pieces for i in family.tokenizer.encode(piece)]


def sampled_ids(family: ChatFamily, message: Message, rng: random.Random) -> list[int]:
    """One way in which a model may answer: as it should, in other pieces, cut off, or noise."""
    canonical = family.render_output(message)
    kind = rng.choice(("canonical", "split", "cut", "noise", "other stop"))
    if kind == "canonical":
        return canonical
    if kind == "cut":
        return canonical[: rng.randrange(len(canonical))]
    ids = split_ids(family, family.text_of(canonical), rng)
    if kind == "noise":
        size = family.tokenizer.size
        plain = (rng.randrange(size) for _ in range(6))
        return [*ids[:4], *(i for i in plain if i not in family.stop_token_ids)]
    stops = family.stop_token_ids if kind == "other stop" else family.stop_token_ids[:1]
    return [*ids, rng.choice(stops)]


def play(
    family: ChatFamily, conversation: Conversation, outputs: Sequence[Sequence[int]]
) -> SessionSamples:
    """The samples of a session in which the answers of a conversation are sampled as `outputs`.

    Each request repeats the answers as a client got them, with the session's results.
    """
    session = Session(SessionRequest(max_seq_len=(1 << 31) - 1))
    tools = [dict(tool) for tool in conversation.tools]
    sent: list[dict[str, Any]] = []
    remaining = iter(outputs)
    for message in conversation.messages:
        if message.role != "assistant":
            sent.append(message.raw())
            continue
        output = next(remaining)
        turn = _record(session, family, sent, tools, output)
        sent.append(json.loads(json.dumps(openai_message(turn.answer, "call"))))
    body = cut_samples(Snapshot.of(session, Journal(Path(os.devnull))))
    return SessionSamples.model_validate_json(body)


def _record(
    session: Session,
    family: ChatFamily,
    sent: list[dict[str, Any]],
    tools: list[dict[str, Any]],
    output: Sequence[int],
) -> Turn:
    started = session.next_event()
    place = session.match(sent, tools).render(family)
    turn = Turn(
        index=len(session.tree.turns),
        parent=place.parent,
        tools_key=place.tools_key,
        new=place.new,
        answer=family.parse_message(output, tools),
        prompt_ids=place.prompt_ids,
        output_ids=np.array(output, np.int32),
        logprobs=-np.arange(len(output), dtype=np.float64),
        length=place.length + len(output),
        rid=str(len(session.tree.turns)),
        versions=((0, 0, len(output)),),
        finish_reason="stop",
        started=started,
        ended=session.next_event(),
    )
    session.tree.add(turn)
    return turn


class SampledCheck:
    """Trained ids are the sampled ids, in one sample where the family appends."""

    def __init__(self, family: ChatFamily, seed: int) -> None:
        self.family, self._rng = family, random.Random(seed)
        self.check = Check("sampled", "trained ids are the sampled ids, whatever was sampled")

    def add(self, number: int, conversation: Conversation) -> None:
        """Check one conversation; raises `MessageError` where the family refuses it."""
        answers = conversation.answers()
        if not answers:
            return
        messages = [conversation.messages[i] for i in answers]
        outputs = [sampled_ids(self.family, m, self._rng) or [0] for m in messages]
        samples = play(self.family, conversation, outputs).samples
        trained = [
            sample.tokens[turn.start : turn.end] for sample in samples for turn in sample.turns
        ]
        masked = sum(sum(sample.loss_mask) for sample in samples)
        where = Where(number, conversation, answers[-1])
        self.check.hold(len(samples) == 1, where, f"{len(samples)} samples came of one branch")
        exact = trained == [list(o) for o in outputs] and masked == sum(map(len, outputs))
        self.check.hold(exact, where, "what is trained is not what was sampled")
