"""Micro-batches: every sample once, under the cap, about as much to compute on every rank."""

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_helpers import CONFIG

from miles_core.modeling.flops import forward_flops
from miles_core.modeling.hf_config import read_spec
from miles_core.modeling.parallel import Layout
from miles_core.training.balance import Work, plan_work, throughput
from miles_core.training.batch import load_rollout
from miles_core.training.packing import (
    Limits,
    first_fit_decreasing,
    micro_batches,
    spread_over_ranks,
)

lengths = st.lists(st.integers(1, 50), max_size=40)
costs = st.lists(st.floats(0.1, 100), min_size=40, max_size=40)


@given(
    lengths,
    costs,
    st.integers(1, 4),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([None, 1, 2, 8]),
    st.booleans(),
    st.booleans(),
)
@settings(deadline=None)
def test_every_sample_once_and_no_micro_batch_above_its_limits(
    sizes: list[int],
    weights: list[float],
    ranks: int,
    unit: int,
    samples: int | None,
    padded: bool,
    equal: bool,
) -> None:
    limits = Limits(tokens=130, samples=samples, padded=padded, unit=unit, slack=unit)
    weights = weights[: len(sizes)]
    plan = micro_batches(sizes, limits, ranks, weights, equal)
    assert len(plan) == ranks
    assert sorted(i for rank in plan for b in rank for i in b) == list(range(len(sizes)))
    for batch in (b for rank in plan for b in rank):
        real = [-(-sizes[i] // unit) * unit for i in batch]
        assert real, "an empty micro-batch"
        assert (max(real) * len(real) if padded else sum(real)) + unit <= 130
        assert samples is None or len(batch) <= samples
    for rank in plan:
        heaviness = [sum(weights[i] for i in batch) for batch in rank]
        assert heaviness == sorted(heaviness, reverse=True)
    assert plan == micro_batches(sizes, limits, ranks, weights, equal)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=8), st.integers(1, 3))
@settings(deadline=None)
def test_the_spread_is_within_grahams_bound_of_the_best(weights: list[int], ranks: int) -> None:
    def largest(of_samples: tuple[int, ...]) -> int:
        return max(
            sum(w for w, r in zip(weights, of_samples, strict=True) if r == rank)
            for rank in range(ranks)
        )

    best = min(map(largest, itertools.product(range(ranks), repeat=len(weights))))
    plan = spread_over_ranks([float(w) for w in weights], ranks)
    got = max(sum(weights[i] for i in members) for members in plan)
    assert got <= (4 / 3 - 1 / (3 * ranks)) * best + 1e-9


@given(lengths.filter(bool), st.integers(1, 4))
@settings(deadline=None)
def test_equal_numbers_where_every_rank_has_the_samples(sizes: list[int], ranks: int) -> None:
    plan = micro_batches(sizes, Limits(100), ranks, equal=True)
    most = max(len(rank) for rank in plan)
    for rank in plan:
        assert len(rank) == min(most, sum(len(batch) for batch in rank))


def test_a_long_sample_weighs_more_than_short_ones_of_as_many_tokens() -> None:
    """By tokens one rank would get the long sample alone, and the other as many short ones."""
    sizes = [80] + [10] * 16
    squares = [float(size * size) for size in sizes]
    plan = micro_batches(sizes, Limits(200), 2, squares)
    (long_one,) = (rank for rank in plan if any(0 in batch for batch in rank))
    assert long_one == [[0]]
    assert sorted(len(rank) for rank in micro_batches(sizes, Limits(200), 2)) == [1, 1]
    assert sorted(sum(map(len, r)) for r in micro_batches(sizes, Limits(200), 2)) == [5, 12]


def test_one_rank_uses_few_micro_batches_of_like_cost() -> None:
    assert len(first_fit_decreasing([50, 50, 50, 50], Limits(100))) == 2
    assert micro_batches([60, 20, 20, 20, 20], Limits(100), 1) == [[[0, 4], [1, 2, 3]]]


def test_a_sample_above_the_limit_is_an_error() -> None:
    with pytest.raises(ValueError, match="101 tokens does not fit max_tokens_per_gpu"):
        first_fit_decreasing([101], Limits(100))


def layout(rank: int) -> Layout:
    return Layout(rank, 2, dp_rank=rank, dp_size=2, tp_rank=0, tp_size=1, lead=True)


def test_all_ranks_make_one_plan_and_know_its_cost(rollout: Path, hf_model: Path) -> None:
    spec = read_spec(hf_model)
    samples = load_rollout(rollout).samples
    works = [plan_work(samples, layout(rank), CONFIG, spec) for rank in range(2)]
    assert works[0].flops == works[1].flops
    for rank, work in enumerate(works):
        of_rank = [s for batch in work.mine for s in batch]
        forward = sum(forward_flops(spec, len(s), int(s.mask.sum())) for s in of_rank)
        assert work.flops[rank] == pytest.approx(3 * forward)
    assert sum(len(b) for work in works for b in work.mine) == len(samples)


def test_throughput_and_imbalance() -> None:
    works = [Work([], [3e12, 1e12]), Work([], [2e12, 2e12])]
    metrics = throughput(works, tokens=1000, ranks=4, seconds=10.0, seconds_update=2.0)
    assert metrics == {
        "tokens_per_second": 100.0,
        "dp_imbalance": 1.25,
        "actor_train_tflops": 1.0,
    }
    assert throughput([], 0, 1, 1.0, None) == {"tokens_per_second": 0.0, "dp_imbalance": 1.0}


def test_the_metrics_of_a_step_have_them(base: Path, rollout: Path) -> None:
    from trainer_helpers import single

    with single(base, base) as worker:
        metrics = worker.train(0, str(rollout))
    assert metrics["dp_imbalance"] == 1.0
    tokens = sum(len(s) for s in load_rollout(rollout).samples)
    assert metrics["tokens_per_second"] == pytest.approx(tokens / metrics["seconds_train"])
    assert metrics["actor_train_tflops"] > 0
