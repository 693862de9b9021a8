"""Random conversations: whatever happens, samples hold what the engine was sent and sampled."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from miles_core.sessions.families.family import ChatFamily, openai_message
from miles_core.sessions.messages import parse_messages
from miles_core.sessions.protocol import SessionRequest
from miles_core.sessions.samples import cut_samples
from miles_core.sessions.session import Session, Turn

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


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps)
def test_random_conversations_are_exact(family: ChatFamily, conversation: list[Any]) -> None:
    session = Session(SessionRequest(max_seq_len=10_000))
    sent: dict[str, tuple[list[int], list[int], list[float]]] = {}
    history: list[Any] = []
    asked: list[Any] = []
    for number, (move, new, (kind, value)) in enumerate(conversation):
        if move == "back":
            history = history[: len(history) // 2]
        if move != "retry" or not asked:
            asked = [*history, *new]
        place = session.place(family, parse_messages(asked), TOOLS)
        ids = sampled(family, kind, value)
        logprobs = [-number - i / 7 for i in range(len(ids))]
        rid = f"r{number}"
        sent[rid] = (place.input_ids(), ids, logprobs)
        answer = family.parse_message(ids)
        session.turns.append(
            Turn(place.parent, place.tools_key, place.new_messages, answer, place.prompt_ids,
                 tuple(ids), tuple(logprobs), rid, 1, "stop")
        )  # fmt: skip
        wire = json.loads(json.dumps(openai_message(answer, "c")))
        history = [*asked, wire]

    result = cut_samples(session)
    spans = [(sample, turn) for sample in result.samples for turn in sample.turns]
    kept = {turn.rid for turn in session.kept_turns()}
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


def test_only_the_sampled_ids_are_trained(family: ChatFamily) -> None:
    session = Session(SessionRequest(max_seq_len=100))
    place = session.place(family, parse_messages([{"role": "user", "content": "a"}]), [])
    answer = family.parse_message([40, 2])
    session.turns.append(
        Turn(None, "[]", place.new_messages, answer, place.prompt_ids, (40, 2), (-1.0, -2.0),
             "r", 1, "stop")
    )  # fmt: skip
    sample = cut_samples(session).samples[0]
    assert sample.tokens[-2:] == [40, 2] and sample.loss_mask[-3:] == [0, 1, 1]
