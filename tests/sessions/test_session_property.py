"""Random conversations: whatever happens, samples hold what the engine was sent and sampled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from miles_core.sessions.families import ChatFamily, openai_message
from miles_core.sessions.journal import Journal
from miles_core.sessions.protocol import SessionRequest, SessionSamples
from miles_core.sessions.samples import Snapshot, cut_samples
from miles_core.sessions.session import Session
from miles_core.sessions.tree import Turn

TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {}}}]
text = st.text(max_size=12)
words = st.text(alphabet="abc é☃", min_size=1, max_size=8).map(lambda t: "x" + t + "x")
calls = st.dictionaries(words, st.one_of(words, st.integers(), st.none()), max_size=2).map(
    lambda arguments: {"function": {"name": "bash", "arguments": json.dumps(arguments)}}
)
canonical = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": words, "tool_calls": st.lists(calls, max_size=2)}
)
malformed = st.sampled_from(
    ["<tool_call>", '<tool_call>\n{"name": 1}\n</tool_call>', "</tool_call> hm", "<think>a",
     '<tool_call>{"name": "x", "arguments": {"a": "\\ud800"}}</tool_call>']
)  # fmt: skip
new_messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "tool"]), "content": text}),
    min_size=1,
    max_size=3,
)
answers = st.one_of(
    st.tuples(st.just("canonical"), canonical),
    st.tuples(st.just("text"), st.one_of(text, malformed)),
    st.tuples(st.just("cut"), canonical),
    st.tuples(st.just("ids"), st.lists(st.integers(0, 300), min_size=1, max_size=8)),
)
steps = st.lists(
    st.tuples(st.sampled_from(["on", "on", "on", "retry", "back"]), new_messages, answers),
    min_size=1,
    max_size=6,
)


def sampled(family: ChatFamily, kind: str, value: Any) -> list[int]:
    if kind == "ids":
        return value
    if kind == "text":
        return [*family.tokenizer.encode(value), family.end_of_turn_id]
    ids = family.render_output(value)
    return ids[:-2] if kind == "cut" else ids


def record(session: Session, family: ChatFamily, asked: list[Any], ids: list[int]) -> Turn:
    """What the server does with a request that the engine answers with `ids`."""
    started = session.next_event()
    place = session.match(asked, TOOLS).render(family)
    rid = f"r{len(session.tree.turns)}"
    turn = Turn(
        index=len(session.tree.turns),
        parent=place.parent,
        tools_key=place.tools_key,
        new=place.new,
        answer=family.parse_message(ids).with_call_ids(rid),
        prompt_ids=place.prompt_ids,
        output_ids=np.array(ids, np.int32),
        logprobs=np.array([-len(rid) - started - i / 7 for i in range(len(ids))]),
        length=place.length + len(ids),
        rid=rid,
        versions=((1, 0, len(ids)),),
        finish_reason="stop",
        started=started,
        ended=session.next_event(),
    )
    session.tree.add(turn)
    return turn


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps)
def test_random_conversations_are_exact(
    family: ChatFamily, tmp_path: Path, conversation: list[Any]
) -> None:
    session = Session(SessionRequest(max_seq_len=10_000))
    journal = Journal(tmp_path / f"{session.key}.session")
    journal.create(session.request)
    sent: dict[str, tuple[list[int], list[int], list[float]]] = {}
    history: list[Any] = []
    asked: list[Any] = []
    for move, new, (kind, value) in conversation:
        if move == "back":
            history = history[: len(history) // 2]
        if move != "retry" or not asked:
            asked = [*history, *new]
        ids = sampled(family, kind, value)
        turn = record(session, family, asked, ids)
        journal.append(turn)
        prompt = turn.ids()[: -len(ids)].tolist()
        sent[turn.rid] = (prompt, ids, turn.logprobs.tolist())
        wire = json.loads(json.dumps(openai_message(turn.answer, "c")))
        history = [*asked, wire]

    cut = cut_samples(Snapshot.of(session, journal))
    stored = journal.read()
    session.loaded = stored.tree
    assert cut_samples(Snapshot.of(session, journal)) == cut, "what is read back is the same"
    result = SessionSamples.model_validate_json(cut)
    spans = [(sample, turn) for sample in result.samples for turn in sample.turns]
    kept = {turn.rid for turn in session.tree.kept()}
    assert sorted(turn.rid for _, turn in spans) == sorted(kept)
    for sample, turn in spans:
        prompt, ids, logprobs = sent[turn.rid]
        assert sample.tokens[: turn.start] == prompt
        assert sample.tokens[turn.start : turn.end] == ids
        assert sample.logprobs[turn.start : turn.end] == logprobs
    assert sum(sum(s.loss_mask) for s in result.samples) == sum(len(sent[r][1]) for r in kept)
    straight = all(move == "on" for move, _, _ in conversation)
    if straight:
        assert len(result.samples) == 1
    if straight and all(kind == "canonical" for _, _, (kind, _) in conversation):
        whole = family.render_text(history, TOOLS, False).removesuffix("\n")
        assert result.samples[0].tokens == family.tokenizer.encode(whole)


def test_only_the_sampled_ids_are_trained(family: ChatFamily, tmp_path: Path) -> None:
    session = Session(SessionRequest(max_seq_len=100))
    turn = record(session, family, [{"role": "user", "content": "a"}], [40, 2])
    cut = cut_samples(Snapshot.of(session, Journal(tmp_path / "x")))
    sample = SessionSamples.model_validate_json(cut).samples[0]
    assert sample.tokens == [*turn.prompt_ids.tolist(), 40, 2]
    assert sample.loss_mask == [0] * len(turn.prompt_ids) + [1, 1]
