"""Advantages of a group against plain loops from the published definitions."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core.training.advantages import group_advantages, has_spread

rewards = st.lists(st.floats(-10, 10, allow_nan=False), min_size=2, max_size=12)
ESTIMATORS = ("grpo", "gspo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
WITH_BASELINE = tuple(name for name in ESTIMATORS if name != "reinforce_plus_plus")


def of(values: list[float], estimator: str, std: bool = True) -> list[float]:
    return group_advantages(torch.tensor(values, dtype=torch.float64), estimator, std).tolist()  # type: ignore[arg-type]


@settings(deadline=None)
@given(rewards, st.sampled_from(["grpo", "gspo"]))
def test_grpo_divides_by_the_unbiased_deviation(values: list[float], estimator: str) -> None:
    mean = sum(values) / len(values)
    std = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))
    spread = any(v != values[0] for v in values)
    want = [(v - mean) / (std + 1e-6) if spread else 0.0 for v in values]
    assert of(values, estimator) == pytest.approx(want, abs=1e-6)
    assert of(values, estimator, std=False) == pytest.approx([v - mean for v in values], abs=1e-9)


@settings(deadline=None)
@given(rewards)
def test_rloo_compares_with_the_mean_of_the_others(values: list[float]) -> None:
    want = [v - (sum(values) - v) / (len(values) - 1) for v in values]
    assert of(values, "rloo") == pytest.approx(want, abs=1e-9)


@settings(deadline=None)
@given(rewards)
def test_reinforce_plus_plus_starts_from_rewards_or_their_distance_to_the_mean(
    values: list[float],
) -> None:
    assert of(values, "reinforce_plus_plus") == values
    mean = sum(values) / len(values)
    baseline = of(values, "reinforce_plus_plus_baseline")
    assert baseline == pytest.approx([v - mean for v in values], abs=1e-9)


@settings(deadline=None)
@given(rewards, st.sampled_from(WITH_BASELINE), st.floats(-5, 5), st.randoms())
def test_a_shift_of_all_rewards_and_their_order_do_not_matter(
    values: list[float], estimator: str, shift: float, random: object
) -> None:
    values = [round(v, 3) for v in values]  # deviations far above the 1e-6 of the definition
    shifted = [v + shift for v in values]
    assert of(shifted, estimator) == pytest.approx(of(values, estimator), abs=1e-5)
    order = list(range(len(values)))
    random.shuffle(order)  # type: ignore[attr-defined]
    moved = of([values[i] for i in order], estimator)
    assert moved == pytest.approx([of(values, estimator)[i] for i in order], abs=1e-9)


@pytest.mark.parametrize("estimator", WITH_BASELINE)
def test_a_group_of_one_and_one_without_spread_give_nothing(estimator: str) -> None:
    assert of([0.3], estimator) == [0.0]
    assert of([0.1, 0.1, 0.1], estimator) == [0.0] * 3
    assert not has_spread(torch.tensor([0.1, 0.1])) and has_spread(torch.tensor([0.1, 0.2]))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_what_is_not_finite_stays_visible(estimator: str) -> None:
    assert all(map(math.isnan, of([1.0, float("inf"), 0.0], estimator)))
