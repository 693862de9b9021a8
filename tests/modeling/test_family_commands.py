"""`miles checkpoint` with a model of every family."""

import json
from pathlib import Path

import pytest
import torch
from parity_helpers import random_model, source_tensors
from random_configs import FAMILIES, random_config

from miles_cli.main import main


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=[] if f == "glm4_moe" else pytest.mark.slow) for f in FAMILIES]
)
def test_convert_inspect_verify_and_export(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, values = random_config(family, 3)
    hf = random_model(tmp_path / "hf", name, values, 3)
    converted, back = tmp_path / "converted", tmp_path / "back"
    assert main(["checkpoint", "convert", str(hf), str(converted)]) == 0
    assert main(["checkpoint", "inspect", str(converted)]) == 0
    assert f"of a {family}" in capsys.readouterr().out
    assert main(["checkpoint", "verify", str(converted), "--hf", str(hf), "--json"]) == 0
    (checked,) = json.loads(capsys.readouterr().out)
    names = [check["name"] for check in checked["checks"]]
    assert "tensors" in names and "logits" in names
    assert main(["checkpoint", "export", str(converted), str(back), "--max-shard-size", "9KB"]) == 0
    assert len(list(back.glob("*.safetensors"))) > 1
    source, exported = source_tensors(hf), source_tensors(back)
    assert set(source) == set(exported)
    assert all(torch.equal(exported[name], value) for name, value in source.items())
