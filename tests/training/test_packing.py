import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_core.training.packing import Limits, first_fit_decreasing, micro_batches

lengths = st.lists(st.integers(1, 50), max_size=40)


@given(lengths, st.integers(50, 120), st.integers(1, 5))
def test_every_sample_once_under_the_limit_and_equally_many_micro_batches(
    sizes: list[int], capacity: int, ranks: int
) -> None:
    plan = micro_batches(sizes, Limits(capacity), ranks)
    assert len({len(rank) for rank in plan}) == 1 and len(plan) == ranks
    flat = [i for rank in plan for batch in rank for i in batch]
    assert sorted(flat) == list(range(len(sizes)))
    assert all(sum(sizes[i] for i in batch) <= capacity for rank in plan for batch in rank)
    assert plan == micro_batches(sizes, Limits(capacity), ranks)


def test_load_is_spread_over_the_ranks() -> None:
    plan = micro_batches([40, 30, 20, 10, 40, 30, 20, 10], Limits(100), 2)
    loads = [sum([40, 30, 20, 10, 40, 30, 20, 10][i] for b in rank for i in b) for rank in plan]
    assert max(loads) - min(loads) <= 20


def test_one_rank_uses_few_micro_batches() -> None:
    assert len(first_fit_decreasing([50, 50, 50, 50], Limits(100))) == 2


def test_a_sample_above_the_limit_is_an_error() -> None:
    with pytest.raises(ValueError, match="101 tokens does not fit max_tokens_per_gpu"):
        first_fit_decreasing([101], Limits(100))


@given(
    lengths.filter(bool),
    st.integers(1, 4),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([None, 1, 2, 8]),
    st.booleans(),
)
def test_no_micro_batch_is_above_its_limits_with_padding(
    sizes: list[int], ranks: int, unit: int, samples: int | None, padded: bool
) -> None:
    limits = Limits(tokens=130, samples=samples, padded=padded, unit=unit, slack=unit)
    plan = micro_batches(sizes, limits, ranks)
    assert sorted(i for rank in plan for b in rank for i in b) == list(range(len(sizes)))
    for batch in (b for rank in plan for b in rank if b):
        real = [-(-sizes[i] // unit) * unit for i in batch]
        assert (max(real) * len(real) if padded else sum(real)) + unit <= 130
        assert samples is None or len(batch) <= samples
