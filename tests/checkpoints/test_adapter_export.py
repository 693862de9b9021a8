"""`miles checkpoint` on checkpoints of adapters: merged export, PEFT's form, check and show."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from trainer_helpers import VOCAB, make_hf, make_rollout, single, weights
from transformers import AutoModelForCausalLM

from miles_cli.main import main
from miles_core.checkpoints import store
from miles_core.checkpoints.convert import convert_to_torch_dist

LORA = {"lora_rank": 4, "lora_alpha": 16.0, "lr": 5e-3}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """hf and base, and a checkpoint in checkpoints, of whose weights `want` holds the served."""
    work = tmp_path_factory.mktemp("adapters")
    convert_to_torch_dist(make_hf(work / "hf", tied=False), work / "base")
    rollout = make_rollout(work / "0.pt")
    with single(work / "base", **LORA) as worker:
        worker.train(0, str(rollout))
        directory = store.begin(work / "checkpoints", 1)
        worker.save(str(directory))
        store.publish(directory, work / "checkpoints", 1, {"weight_version": 2}, keep=1)
        torch.save(weights(worker), work / "want.pt")
    return work


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, Any]:
    status = main(["checkpoint", *argv, "--json"])
    said = capsys.readouterr()
    return status, json.loads(said.out) if said.out else said.err


def logits(model: Any) -> torch.Tensor:
    tokens = torch.arange(40)[None] % VOCAB
    with torch.no_grad():
        return model.eval()(tokens).logits[0]


def test_export_is_the_merged_model_or_what_peft_loads(
    work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, want = str(work / "checkpoints"), torch.load(work / "want.pt", weights_only=True)
    assert run(capsys, "export", root, str(tmp_path / "merged"))[0] == 0
    got = load_file(tmp_path / "merged" / "model.safetensors")
    assert got.keys() == want.keys()
    assert all(torch.equal(value, want[name]) for name, value in got.items())

    status, answer = run(capsys, "export", root, str(tmp_path / "peft"), "--adapter")
    assert status == 0 and answer["files"] == ["adapter_config.json", "adapter_model.safetensors"]
    base = AutoModelForCausalLM.from_pretrained(work / "hf", dtype=torch.float32)
    begun = logits(base)
    adapted = logits(PeftModel.from_pretrained(base, tmp_path / "peft"))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    scale = begun.abs().max().item()
    assert (logits(merged) - adapted).abs().max().item() < 1e-5 * scale
    assert (begun - adapted).abs().max().item() > 1e-2 * scale
    for folder in ("merged", "peft"):
        status, said = run(capsys, "export", root, str(tmp_path / folder), "--adapter")
        assert status == 2 and "not empty" in said


def test_export_converts_the_dtype_of_both(
    work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for out, flags, file in (
        ("merged", [], "model.safetensors"),
        ("peft", ["--adapter"], "adapter_model.safetensors"),
    ):
        argv = ["export", str(work / "checkpoints"), str(tmp_path / out), "--dtype", "bfloat16"]
        assert run(capsys, *argv, *flags)[0] == 0
        values = load_file(tmp_path / out / file).values()
        assert {value.dtype for value in values} == {torch.bfloat16}


def test_inspect_and_verify_name_the_model_under_the_adapters(
    work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = str(work / "checkpoints")
    _, held = run(capsys, "inspect", root)
    assert held["adapters"]["rank"] == 4 and held["adapters"]["base"] == str(work / "base")
    assert main(["checkpoint", "inspect", root]) == 0
    assert "adapters" in capsys.readouterr().out
    status, (result,) = run(capsys, "verify", root, "--hf", str(work / "hf"))
    assert status == 0
    assert [check["name"] for check in result["checks"]] == ["files", "index", "base"]
    other = make_hf(tmp_path / "other")
    status, (result,) = run(capsys, "verify", root, "--hf", str(other))
    assert status == 1 and "not the model" in result["checks"][-1]["problem"]


def test_a_model_that_was_moved_or_lost_is_said(
    work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(work, tmp_path / "work")
    root, moved = str(tmp_path / "work" / "checkpoints"), tmp_path / "moved"
    hidden = work / "hidden"
    (work / "base").rename(hidden)
    try:
        for command in (["verify", root], ["export", root, str(tmp_path / "no")]):
            assert run(capsys, *command)[0] != 0
        assert not (tmp_path / "no").exists()
        shutil.copytree(hidden, moved)
        assert run(capsys, "verify", root, "--base", str(moved))[0] == 0
        assert run(capsys, "export", root, str(tmp_path / "yes"), "--base", str(moved))[0] == 0
        # adapters alone need no model
        assert run(capsys, "export", root, str(tmp_path / "peft"), "--adapter")[0] == 0
        shard = next(moved.glob("*.distcp"))
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)
        status, said = run(capsys, "export", root, str(tmp_path / "bad"), "--base", str(moved))
        assert status == 2 and shard.name in said
        status, said = run(capsys, "export", str(moved), str(tmp_path / "bad"), "--adapter")
        assert status == 2 and "holds no adapters" in said
    finally:
        hidden.rename(work / "base")
