"""SwiGLU, rotary positions and RMSNorm: values and gradients of the formulas in float64."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from miles_core.modeling import elementwise, norm, parallel

Function = Callable[..., torch.Tensor]


@pytest.fixture
def groups() -> Iterator[None]:
    parallel.start(0, 1, "127.0.0.1", 0, 1, seed=1)
    yield
    parallel.stop()


def assert_same(ours: Function, formula: Function, *given: torch.Tensor) -> None:
    """`ours` in float32 and in bfloat16 beside `formula` in float64, and what backward gives."""
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 0.02)):
        rounded = [x.to(dtype) for x in given]
        mine = [x.clone().requires_grad_() for x in rounded]
        plain = [x.double().requires_grad_() for x in rounded]
        got, want = ours(*mine), formula(*plain)
        direction = torch.randn(want.shape, dtype=torch.float64).to(dtype)
        assert got.dtype == dtype and got.shape == want.shape
        got.backward(direction)
        want.backward(direction.double())
        pairs = [(got, want), *((a.grad, b.grad) for a, b in zip(mine, plain, strict=True))]
        for a, b in pairs:
            assert a is not None and b is not None
            assert float((a.double() - b).abs().max()) <= tolerance * float(b.abs().max() + 1)


def plain_swiglu(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def test_swiglu() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 2, 12) * 3
    assert_same(elementwise.swiglu, plain_swiglu, x)
    weights = torch.rand(10, 1)
    assert_same(
        lambda x, w: elementwise.weighted_swiglu(x, None, w),
        lambda x, w: plain_swiglu(x) * w,
        x.flatten(0, 1),
        weights,
    )
    with pytest.raises(ValueError, match="bias"):
        elementwise.swiglu(x, torch.zeros(12))  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(7, 32), (5, 1, 3, 8)])
def test_rms_norm(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    assert_same(
        lambda x, w: norm._RMSNorm.apply(x, w, 1e-6),
        lambda x, w: x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w,
        torch.randn(shape) * 4,
        torch.randn(shape[-1]),
    )


def test_rms_norm_beside_a_massive_value() -> None:
    """As real models have them in a few channels; each output to a few units of rounding."""
    torch.manual_seed(0)
    x, weight = torch.randn(200, 4096), torch.rand(4096) + 0.5
    x[:, 3] *= 3000
    got = norm._RMSNorm.apply(x, weight, 1e-6).double()
    wide = x.double()
    want = wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight
    assert float(((got - want) / want).abs().max()) <= 8e-7


def rotated(t: torch.Tensor, positions: torch.Tensor, rates: torch.Tensor, apart: bool) -> Any:
    """As products of complex numbers; `apart`: pairs stand side by side."""
    half = len(rates)
    front, rest = t[..., : 2 * half], t[..., 2 * half :]
    pairs = (front[..., 0::2], front[..., 1::2]) if apart else front.chunk(2, dim=-1)
    turned = torch.complex(*pairs) * torch.polar(
        torch.ones(()).double(), positions[:, None].double() * rates
    ).view(len(t), *[1] * (t.ndim - 2), half)
    return torch.cat((turned.real, turned.imag, rest), dim=-1)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("size", [8, 6])
def test_rotary_positions(groups: None, apart: bool, size: int) -> None:
    torch.manual_seed(0)
    lengths = [4, 1, 6]
    rates = 1.0 / 100.0 ** (torch.arange(0, size, 2).double() / size)
    table = torch.outer(torch.arange(11).double(), rates).float().repeat(1, 2)[:, None, None]
    t = torch.randn(sum(lengths), 3, 8)
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    places = torch.cat([torch.arange(n) for n in lengths])
    group = parallel.cp_group()
    assert_same(
        lambda x: elementwise.rotate_segments(
            x, bounds, table[:6], multi_latent_attention=apart, cp_group=group
        ),
        lambda x: rotated(x, places, rates, apart),
        t,
    )
    assert_same(
        lambda x: elementwise.rotate_rows(x, table, multi_latent_attention=apart),
        lambda x: rotated(x, torch.arange(11), rates, apart),
        torch.randn(11, 2, 3, 8),
    )


def test_angles_follow_the_segments(groups: None) -> None:
    """What is kept for the layers of a micro-batch is not used for the next micro-batch."""
    table = torch.outer(torch.arange(6.0), torch.tensor([1.0, 0.1])).repeat(1, 2)[:, None, None]
    t = torch.ones(6, 1, 4)
    group = parallel.cp_group()
    for lengths in ([6], [2, 4], [3, 3]):
        bounds = torch.tensor([0, *lengths]).cumsum(0).int()
        out = elementwise.rotate_segments(t, bounds, table, cp_group=group)
        for start in bounds[:-1].tolist():
            assert torch.equal(out[start], t[start]), lengths
