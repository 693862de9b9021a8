from pathlib import Path

import pytest
from trainer_helpers import make_hf, make_rollout

from miles_core.checkpoints.convert import convert_to_torch_dist


@pytest.fixture(scope="session")
def hf_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hf(tmp_path_factory.mktemp("hf") / "tiny")


@pytest.fixture(scope="session")
def base(hf_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("base") / "torch_dist"
    convert_to_torch_dist(hf_model, out)
    return out


@pytest.fixture(scope="session")
def rollout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_rollout(tmp_path_factory.mktemp("rollout") / "0.pt")
