"""The real weights of SmolLM2-135M: logits and gradients like transformers', a lossless round trip.

Made by `examples/models/smollm2.py` in `models/` of the project, once.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from parity_helpers import measure, source_tensors

from miles_core.checkpoints.convert import convert_to_torch_dist, export_to_hf
from miles_core.checkpoints.verify import verify
from miles_core.modeling import parallel

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def smollm2() -> Path:
    script = ROOT / "examples" / "models" / "smollm2.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip().splitlines()[-1])


@pytest.fixture
def groups() -> Iterator[None]:
    parallel.start(0, 1, "127.0.0.1", 0, 1, seed=1)
    yield
    parallel.stop()


def test_logits_and_gradients(smollm2: Path, groups: None) -> None:
    result = measure(smollm2, [64, 1, 37, 100])
    assert result.logits <= 1e-4
    assert result.gradients <= 1e-3, result.worst_gradient


def test_conversion_and_export_lose_nothing(smollm2: Path, tmp_path: Path) -> None:
    convert_to_torch_dist(smollm2, tmp_path / "converted")
    checks = verify(tmp_path / "converted", smollm2).checks
    assert [check.problem for check in checks] == [None] * len(checks)
    assert {"tensors", "logits"} <= {check.name for check in checks}
    export_to_hf(tmp_path / "converted", tmp_path / "back")
    source, back = source_tensors(smollm2), source_tensors(tmp_path / "back")
    assert set(back) == set(source)
    for name, value in source.items():
        assert back[name].dtype == value.dtype and torch.equal(back[name], value), name
