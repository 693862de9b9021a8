"""Advantages and returns of a critic's values against loops in float64, and the clipped loss."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loss_table import TableCritic, make_case, run_step, split

from miles_core.modeling import parallel
from miles_core.training.config import TrainerConfig
from miles_core.training.gae import gae
from miles_core.training.value_loss import ValueData, value_loss

numbers = st.floats(-3, 3)
PPO = TrainerConfig(
    advantage_estimator="ppo", gamma=0.98, lambd=0.9, kl_loss_coef=0.0, global_batch_size=9
)


@given(
    steps=st.lists(st.tuples(numbers, numbers), min_size=0, max_size=40),
    gamma=st.floats(0.1, 1),
    lambd=st.floats(0, 1),
)
def test_it_is_the_exponential_mean_of_the_k_step_advantages(
    steps: list[tuple[float, float]], gamma: float, lambd: float
) -> None:
    """Equation 16 from equation 14: (1 - l) (A1 + l A2 + l^2 A3 + ...), where A_k looks k steps
    ahead; all that look beyond the end are the same."""
    rewards, values = [r for r, _ in steps], [v for _, v in steps]
    advantages, returns = gae(rewards, values, gamma, lambd)
    size = len(steps)
    for t in range(size):
        total = 0.0
        for k in range(1, size - t + 1):
            looking = sum(gamma**i * rewards[t + i] for i in range(k)) - values[t]
            if t + k < size:
                looking += gamma**k * values[t + k]
            last = k == size - t
            total += lambd ** (k - 1) * (1.0 if last else 1 - lambd) * looking
        assert advantages[t] == pytest.approx(total, rel=1e-9, abs=1e-9)
        assert returns[t] == pytest.approx(total + values[t], rel=1e-9, abs=1e-9)


def test_plain_returns_and_plain_differences() -> None:
    """lambda 1: the return itself, whatever the values say; lambda 0: the error of one step."""
    rewards, values = [0.0, 0.5, 1.0], [3.0, -1.0, 2.0]
    advantages, returns = gae(rewards, values, 1.0, 1.0)
    assert returns == [1.5, 1.5, 1.0] and advantages == [-1.5, 2.5, -1.0]
    assert gae(rewards, values, 1.0, 0.0)[0] == [-4.0, 3.5, -1.0]


def test_a_trajectory_is_one_episode_over_its_samples() -> None:
    """The reward reaches the tokens of earlier samples, through the values between."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    layout = parallel.start(0, 1, "127.0.0.1", 0, 1, seed=1)
    try:
        case = make_case(2)
        whole, cut = (
            run_step(c, PPO, layout, TableCritic(c, PPO))[2].own_samples
            for c in (case, split(case))
        )
        for number, reward in enumerate(case.rewards):
            own = sorted((s for s in whole if s.trajectory == number), key=lambda s: s.index)
            parts = sorted((s for s in cut if s.trajectory == number), key=lambda s: s.index)
            returns = torch.cat([s.returns[s.mask] for s in own])
            assert torch.equal(returns, torch.cat([s.returns[s.mask] for s in parts]))
            assert all((s.returns[~s.mask] == 0).all() for s in own)
            if len(returns):
                values = torch.cat([s.values[s.mask] for s in own]).tolist()
                rewards = [0.0] * (len(values) - 1) + [reward]
                assert returns.tolist() == pytest.approx(gae(rewards, values, 0.98, 0.9)[1])
    finally:
        parallel.stop()
        torch.set_default_dtype(default)


def test_the_value_loss_is_the_larger_of_two_errors() -> None:
    dice = torch.Generator().manual_seed(3)
    old, returns, move = (torch.randn(200, generator=dice, dtype=torch.float64) for _ in range(3))
    weights = torch.rand(200, generator=dice, dtype=torch.float64)
    values = (old + move).requires_grad_()
    loss, sums = value_loss(values, ValueData(returns, old, weights), clip=0.3)
    total, clipped = 0.0, 0.0
    for v, o, r, w in zip(values.tolist(), old.tolist(), returns.tolist(), weights, strict=True):
        near = min(max(v, o - 0.3), o + 0.3)
        total += w.item() * max((v - r) ** 2, (near - r) ** 2)
        clipped += w.item() * ((near - r) ** 2 > (v - r) ** 2)
    assert loss.item() == pytest.approx(total, rel=1e-12)
    assert sums["value_clipfrac"].item() == pytest.approx(clipped, rel=1e-12)
    assert 0 < clipped < weights.sum()
    gradient = torch.autograd.grad(loss, values)[0]
    cut = (old + move.clamp(-0.3, 0.3) - returns).square() > (values - returns).square()
    assert (gradient[cut] == 0).all() and cut.any()
    plain = 2 * weights * (values - returns)
    assert torch.allclose(gradient[~cut], plain[~cut])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_shows(bad: float) -> None:
    data = ValueData(torch.zeros(2), torch.zeros(2), torch.ones(2))
    assert not torch.isfinite(value_loss(torch.tensor([0.0, bad]), data, 0.2)[0])
