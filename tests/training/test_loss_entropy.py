"""Log-probabilities and entropies with gradients, against torch's own softmax."""

from collections.abc import Iterator

import pytest
import torch

from miles_core.modeling import parallel
from miles_core.modeling.log_probs import log_probs_and_entropy, token_log_probs_and_entropy

TEMPERATURE = 0.7


@pytest.fixture(autouse=True)
def groups() -> Iterator[None]:
    parallel.start(0, 1, "127.0.0.1", 0, 1, seed=1)
    yield
    parallel.stop()


@pytest.mark.parametrize("scale", [0.1, 3.0, 300.0])
def test_values_and_gradients(scale: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(9, 40) * scale
    targets = torch.randint(0, 40, (9,))
    of_value, of_entropy = torch.randn(9), torch.randn(9)
    mine = logits.clone().requires_grad_()
    plain = logits.double().requires_grad_()
    values, entropy = token_log_probs_and_entropy(mine, targets, TEMPERATURE)
    distribution = torch.log_softmax(plain / TEMPERATURE, -1)
    want = distribution.gather(1, targets[:, None])[:, 0]
    want_entropy = -(distribution.exp() * distribution).sum(-1)
    assert torch.allclose(values.double(), want, rtol=1e-5, atol=1e-5)
    assert torch.allclose(entropy.double(), want_entropy, rtol=1e-5, atol=1e-5)
    (values * of_value + entropy * of_entropy).sum().backward()
    (want * of_value + want_entropy * of_entropy).sum().backward()
    assert mine.grad is not None and plain.grad is not None
    assert torch.allclose(mine.grad.double(), plain.grad, rtol=1e-4, atol=2e-5)
    observed = log_probs_and_entropy(logits.clone(), targets, TEMPERATURE)
    assert torch.allclose(observed[0], values) and torch.allclose(observed[1], entropy, atol=1e-3)
