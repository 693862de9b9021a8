"""What an engine may answer: weight versions over a turn, and rows of routed experts."""

from __future__ import annotations

import base64
from typing import Any

import httpx
import numpy as np
import pytest
from session_helpers import BASH, Agent, ScriptedEngine
from test_session_server import CALL, DONE, OBSERVED, USER, check_exact

from miles_core.sessions.families import ChatFamily
from miles_core.sessions.generation import EngineFailure, WantedExperts, read_generation

ROW = 8


def answer(count: int, **meta: Any) -> dict[str, Any]:
    entries = [[-0.5, token, None] for token in range(count)]
    reason = {"type": "stop"}
    return {
        "output_ids": list(range(count)),
        "meta_info": {
            "finish_reason": reason,
            "weight_version": "7",
            "output_token_logprobs": entries,
            **meta,
        },
    }


def spans(*edges: tuple[int, int, int]) -> list[dict[str, Any]]:
    return [{"version": str(v), "start": a, "end": b} for v, a, b in edges]


def test_versions_cover_the_turn() -> None:
    assert read_generation(answer(3), 9).versions == ((7, 0, 3),)
    given = answer(3, weight_versions=spans((6, 0, 1), (7, 1, 3)))
    assert read_generation(given, 9).versions == ((6, 0, 1), (7, 1, 3))


@pytest.mark.parametrize(
    "edges",
    [
        [(6, 0, 1), (7, 2, 3)],
        [(6, 0, 2), (7, 1, 3)],
        [(6, 0, 2)],
        [(6, 1, 3)],
        [(6, 0, 4)],
        [(6, 0, 0), (7, 0, 3)],
    ],
)
def test_versions_with_gaps_are_refused(edges: list[tuple[int, int, int]]) -> None:
    with pytest.raises(EngineFailure, match="weight_versions"):
        read_generation(answer(3, weight_versions=spans(*edges)), 9)


def rows(first: int, end: int) -> bytes:
    """Rows of `ROW` bytes that say which token they belong to."""
    return np.repeat(np.arange(first, end, dtype=np.int32), ROW // 4).tobytes()


@pytest.mark.parametrize("first", [0, 4])
@pytest.mark.parametrize("given_from", [0, 4])
def test_wanted_rows_are_cut_from_what_the_engine_gives(first: int, given_from: int) -> None:
    if given_from > first:
        pytest.skip("an engine gives at least what is asked for")
    total = 10 + 3 - 1
    encoded = base64.b64encode(rows(given_from, total)).decode()
    wanted = WantedExperts(first, ROW if first else 0)
    got = read_generation(answer(3, routed_experts=encoded), 9, 10, wanted)
    assert got.experts == rows(first, total) and got.experts_row == ROW


@pytest.mark.parametrize("value", [None, "", "?", base64.b64encode(b"12345").decode()])
def test_rows_that_do_not_fit_are_refused(value: str | None) -> None:
    with pytest.raises(EngineFailure, match="routed_experts"):
        read_generation(answer(3, routed_experts=value), 9, 10, WantedExperts(4, ROW))
    with pytest.raises(EngineFailure, match="routed_experts"):
        read_generation(answer(3, routed_experts=value), 9, 10, WantedExperts(0, 0))


@pytest.mark.parametrize("whole", [False, True])
def test_samples_have_a_row_for_each_token_but_the_last(
    whole: bool, server_url: str, http: httpx.Client, engine: ScriptedEngine, family: ChatFamily
) -> None:
    agent = Agent(server_url, http, routed_experts=True)
    engine.experts = lambda first, end: rows(0 if whole else first, end)
    engine.script = [family.render_output(m) for m in (CALL, DONE, DONE)]
    first = agent.message([USER], tools=[BASH])
    agent.message([USER, first, OBSERVED], tools=[BASH])
    agent.message([USER, first, {"role": "user", "content": "no"}], tools=[BASH])
    engine.experts = None
    samples = agent.samples()
    check_exact(samples, engine)
    assert len(samples["samples"]) == 2
    for sample in samples["samples"]:
        data = base64.b64decode(sample["routed_experts"])
        assert data == rows(0, len(sample["tokens"]) - 1)


def test_samples_tell_the_versions_of_a_turn(
    server_url: str, http: httpx.Client, engine: ScriptedEngine, family: ChatFamily
) -> None:
    agent = Agent(server_url, http)
    given = answer(3, weight_versions=spans((6, 0, 1), (7, 1, 3)))
    engine.script = [given]
    agent.message([USER])
    (sample,) = agent.samples()["samples"]
    (turn,) = sample["turns"]
    start = turn["start"]
    assert turn["weight_version"] == 6
    assert turn["weight_versions"] == [
        {"version": 6, "start": start, "end": start + 1},
        {"version": 7, "start": start + 1, "end": start + 3},
    ]
