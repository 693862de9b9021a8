"""Draws follow the distribution whose log-probabilities are reported."""

from __future__ import annotations

import pytest
import torch

from miles_core.engines.sampling import RequestError, Sampler, SamplingParams, parse_sampling

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])
ROWS = 20000


def frequencies(params: SamplingParams) -> torch.Tensor:
    """Share of each token over many draws."""
    logits = LOGITS.repeat(ROWS, 1)
    tokens, _ = Sampler(3).draw(logits, [params] * ROWS, [0] * ROWS)
    return torch.bincount(torch.tensor(tokens), minlength=len(LOGITS)) / ROWS


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_tempered_softmax(temperature: float) -> None:
    wanted = torch.softmax(LOGITS / temperature, -1)
    # Four standard deviations of a share of ROWS draws are below 0.015.
    assert (frequencies(SamplingParams(temperature=temperature)) - wanted).abs().max() < 0.015


@pytest.mark.parametrize(
    ("params", "left"),
    [
        (SamplingParams(top_k=2), 2),
        (SamplingParams(top_p=0.6), 2),  # 0.56 + 0.21
        (SamplingParams(top_p=0.5), 1),
        (SamplingParams(min_p=0.2), 3),  # at least 0.2 of the likeliest
    ],
)
def test_restrictions_leave_the_likeliest(params: SamplingParams, left: int) -> None:
    wanted = torch.softmax(LOGITS[:left], -1)
    found = frequencies(params)
    assert (found[:left] - wanted).abs().max() < 0.015
    assert found[left:].sum() == 0


def test_reported_logprob_ignores_the_restriction() -> None:
    params = [SamplingParams(temperature=0.7, top_k=1)]
    tokens, logprobs = Sampler(0).draw(LOGITS.unsqueeze(0), params, [0])
    assert tokens == [0]
    assert logprobs[0] == pytest.approx(float(torch.log_softmax(LOGITS / 0.7, -1)[0]), abs=1e-6)


def test_a_seed_fixes_the_draw_whatever_the_batch() -> None:
    logits = torch.zeros(3, 500)
    seeded = SamplingParams(sampling_seed=9)
    alone, _ = Sampler(0).draw(logits[:1], [seeded], [4])
    batch, _ = Sampler(1).draw(logits, [SamplingParams(), seeded, seeded], [4, 4, 5])
    assert batch[1] == alone[0] != batch[2]


def test_a_temperature_near_zero_is_greedy() -> None:
    params = parse_sampling({"temperature": 1e-300})
    tokens, logprobs = Sampler(0).draw(LOGITS.unsqueeze(0), [params], [0])
    assert tokens == [0]
    assert logprobs[0] == pytest.approx(float(torch.log_softmax(LOGITS, -1)[0]), abs=1e-6)


def test_greedy_and_drawn_rows_stand_in_one_batch() -> None:
    greedy, drawn = SamplingParams(temperature=0), SamplingParams(temperature=2.0)
    tokens, _ = Sampler(0).draw(LOGITS.repeat(400, 1), [greedy, drawn] * 200, [0] * 400)
    assert set(tokens[::2]) == {0} and len(set(tokens[1::2])) == len(LOGITS)


def test_logits_that_are_no_numbers_show_in_the_logprob() -> None:
    tokens, logprobs = Sampler(0).draw(LOGITS[None] * float("nan"), [SamplingParams()], [0])
    assert 0 <= tokens[0] < len(LOGITS) and logprobs[0] != logprobs[0]


def test_neutral_values_pass_and_others_are_named() -> None:
    assert parse_sampling({"n": 1, "repetition_penalty": 1.0}) == SamplingParams()
    for name in ("n", "repetition_penalty", "seed"):
        with pytest.raises(RequestError, match=name):
            parse_sampling({name: 2})
