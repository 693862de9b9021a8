"""Logits, gradients, conversion and export of random configurations against transformers."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from parity_helpers import measure, random_model
from random_configs import FAMILIES, random_config

from miles_core.modeling import parallel


@pytest.fixture(autouse=True)
def groups() -> Iterator[None]:
    parallel.start(0, 1, "127.0.0.1", 0, 1, seed=1)
    yield
    parallel.stop()


def check(family: str, seed: int, tmp_path: Path) -> None:
    name, values = random_config(family, seed)
    path = random_model(tmp_path / "hf", name, values, seed)
    result = measure(path, [9, 1, 20, 14], seed)
    assert result.logits <= 2e-5, values
    assert result.gradients <= 1e-3, (values, result.worst_gradient)
    assert result.exported_alike, values


@pytest.mark.parametrize(
    ("family", "seed"),
    [
        ("llama", 2),  # yarn
        ("qwen3", 0),  # llama3
        ("qwen3_moe", 2),  # linear
        ("glm4_moe", 4),  # no layer with experts
        ("glm4_moe", 5),
        ("glm4_moe_lite", 2),
        ("glm4_moe_lite", 3),
    ],
)
def test_a_random_configuration_is_computed_like_transformers(
    family: str, seed: int, tmp_path: Path
) -> None:
    check(family, seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("family", list(FAMILIES))
def test_many_random_configurations(family: str, seed: int, tmp_path: Path) -> None:
    check(family, seed, tmp_path)
