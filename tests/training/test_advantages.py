import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miles_core.training.advantages import group_advantages

rewards = st.lists(st.floats(-10, 10, allow_nan=False), min_size=2, max_size=12)


@given(rewards)
def test_matches_the_definition(values: list[float]) -> None:
    mean = sum(values) / len(values)
    std = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))
    spread = any(v != values[0] for v in values)
    got = group_advantages(torch.tensor(values, dtype=torch.float64), True).tolist()
    want = [(v - mean) / (std + 1e-6) if spread else 0.0 for v in values]
    assert got == pytest.approx(want, abs=1e-6)
    plain = group_advantages(torch.tensor(values, dtype=torch.float64), False).tolist()
    assert plain == pytest.approx([v - mean for v in values], abs=1e-9)


def test_a_group_of_one_and_one_without_spread_give_nothing() -> None:
    assert group_advantages(torch.tensor([0.3]), True).tolist() == [0.0]
    assert group_advantages(torch.tensor([0.1, 0.1, 0.1]), True).tolist() == [0.0] * 3


def test_a_reward_that_is_not_finite_is_an_error() -> None:
    with pytest.raises(ValueError, match="finite"):
        group_advantages(torch.tensor([1.0, float("nan")]), True)
