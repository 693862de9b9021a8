"""Log-probabilities and entropies with gradients, against torch's own softmax in float64."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from log_probs_process import ROWS, TEMPERATURE, VOCAB, WIDTH, inputs, own
from rank_helpers import fork_ranks

from miles_core.modeling import log_probs, parallel
from miles_core.modeling.log_probs import Head, log_probs_and_entropy, token_log_probs


@pytest.fixture
def groups() -> Iterator[None]:
    parallel.start(0, 1, "127.0.0.1", 0, 1, seed=1)
    yield
    parallel.stop()


def expected(scale: float, entropy: bool) -> dict[str, torch.Tensor]:
    given = {name: value.double() for name, value in inputs(scale).items()}
    hidden, weight = given["hidden"].requires_grad_(), given["weight"].requires_grad_()
    distribution = torch.log_softmax(hidden @ weight.t() / TEMPERATURE, -1)
    values = distribution.gather(1, given["targets"].long()[:, None])[:, 0]
    entropies = -(distribution.exp() * distribution).sum(-1)
    total = values * given["of_value"]
    (total + entropies * given["of_entropy"] if entropy else total).sum().backward()
    assert hidden.grad is not None and weight.grad is not None
    return {
        "values": values.detach(),
        "entropies": entropies.detach() if entropy else torch.zeros(ROWS).double(),
        "observed": torch.stack((values, entropies)).detach(),
        "of_hidden": hidden.grad,
        "of_weight": weight.grad,
    }


def assert_equal(got: dict[str, Any], want: dict[str, torch.Tensor], tolerance: float) -> None:
    for name, value in want.items():
        size = max(1.0, float(value.abs().max()))
        assert float((got[name].double() - value).abs().max()) <= tolerance * size, name


@pytest.mark.parametrize("scale", [0.03, 1.0, 100.0])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("kept", [0, log_probs.KEPT])
@pytest.mark.parametrize("rows", [5, ROWS, 4 * ROWS])
def test_values_and_gradients_in_blocks(
    groups: None, monkeypatch: pytest.MonkeyPatch, scale: float, entropy: bool, kept: int, rows: int
) -> None:
    monkeypatch.setattr(log_probs, "KEPT", kept)
    monkeypatch.setattr(log_probs, "BLOCK", {"cpu": rows * VOCAB})
    monkeypatch.setattr(log_probs, "MIN_ROWS", 1)
    rounding = 1e-6 * max(1.0, scale)  # of the logits
    assert_equal(own(scale, entropy), expected(scale, entropy), rounding)


def test_a_vocabulary_over_two_ranks(tmp_path: Path) -> None:
    files = fork_ranks("log_probs_process", 2, tmp_path / "run", None)
    ranks = [torch.load(file) for file in files]
    for name in ranks[0]:
        first, second = (answers[name] for answers in ranks)
        for key in ("values", "entropies", "observed", "of_hidden"):
            assert torch.equal(first[key], second[key]), (name, key)
        first["of_weight"] = torch.cat((first["of_weight"], second["of_weight"]))
        assert_equal(first, expected(1.0, name.endswith("True")), 1e-6)


@pytest.mark.parametrize("entropy", [False, True])
def test_bfloat16_computes_in_float32(
    groups: None, monkeypatch: pytest.MonkeyPatch, entropy: bool
) -> None:
    monkeypatch.setattr(log_probs, "BLOCK", {"cpu": 1})
    monkeypatch.setattr(log_probs, "MIN_ROWS", 4)
    got = own(1.0, entropy, torch.bfloat16)
    assert got["values"].dtype == torch.float32 and got["of_weight"].dtype == torch.bfloat16
    assert_equal(got, expected(1.0, entropy), 0.04)


def test_a_frozen_weight_gets_no_gradient(groups: None) -> None:
    given = inputs(1.0)
    head = Head(given["hidden"].requires_grad_(), given["weight"])
    token_log_probs(head, given["targets"], TEMPERATURE).sum().backward()
    assert given["hidden"].grad is not None and given["weight"].grad is None


def test_no_rows(groups: None) -> None:
    head = Head(torch.zeros(0, WIDTH, requires_grad=True), torch.zeros(VOCAB, WIDTH))
    values, entropies = log_probs_and_entropy(head, torch.zeros(0, dtype=torch.int64), 1.0)
    (values.sum() + entropies.sum()).backward()
    assert values.shape == entropies.shape == (0,)


@pytest.mark.parametrize("entropy", [False, True])
def test_memory_does_not_grow_with_the_rows(
    groups: None, monkeypatch: pytest.MonkeyPatch, entropy: bool
) -> None:
    """The largest tensor of forward and backward is a block, the weight or the hidden states."""
    monkeypatch.setattr(log_probs, "KEPT", 0)
    monkeypatch.setattr(log_probs, "BLOCK", {"cpu": 1})
    monkeypatch.setattr(log_probs, "MIN_ROWS", 8)
    hidden = torch.randn(640, 4).requires_grad_()
    head = Head(hidden, torch.randn(VOCAB, 4).requires_grad_())
    targets = torch.zeros(640, dtype=torch.int64)
    with torch.profiler.profile(profile_memory=True) as profile:
        if entropy:
            values = sum(log_probs_and_entropy(head, targets, 1.0))
        else:
            values = token_log_probs(head, targets, 1.0)
        values.sum().backward()
    largest = max(event.cpu_memory_usage for event in profile.events())
    assert largest < 640 * VOCAB * 4 / 2
