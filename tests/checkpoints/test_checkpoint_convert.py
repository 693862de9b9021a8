"""Conversion: verified, skipped for the same source only, complete or absent."""

import json
import multiprocessing
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from miles_core.checkpoints import convert
from miles_core.checkpoints.fingerprint import source_fingerprint


@pytest.fixture
def source(tmp_path: Path) -> Path:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    return tmp_path / "hf"


def test_convert_skip_and_export(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "torch_dist"
    first = convert.convert_to_torch_dist(source, out)
    assert not first.skipped and first.logit_difference <= convert.LOGIT_TOLERANCE
    assert (out / "hf" / "tokenizer.json").is_file()
    assert not (out / "hf" / "model.safetensors").exists()
    assert convert.convert_to_torch_dist(source, out).skipped
    shutil.move(source, tmp_path / "moved")
    assert convert.convert_to_torch_dist(tmp_path / "moved", out).skipped
    assert multiprocessing.active_children() == []

    assert convert.main(["--export", str(out), str(tmp_path / "back"), "--json"]) == 0
    want = load_file(tmp_path / "moved" / "model.safetensors")
    got = load_file(tmp_path / "back" / "model.safetensors")
    assert set(got) == set(want) and all(torch.equal(got[n], want[n]) for n in want)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "float32"
    assert sorted(p.name for p in out.parent.iterdir()) == ["torch_dist"]


def test_a_changed_source_or_a_damaged_result_is_converted_again(
    source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    first = convert.convert_to_torch_dist(source, out)
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"] += 0.5
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    second = convert.convert_to_torch_dist(source, out)
    assert not second.skipped and second.fingerprint != first.fingerprint
    file = next(out.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1])
    assert not convert.convert_to_torch_dist(source, out).skipped


def test_a_conversion_that_computes_something_else_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from miles_core.modeling import mapping

    monkeypatch.setattr(mapping, "_join_qkv", lambda q, k, v, spec: torch.cat([k, q, v]))
    with pytest.raises(convert.ConversionError, match="differ"):
        convert.convert_to_torch_dist(source, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf"]


def test_errors_name_the_path(source: Path, tmp_path: Path, capsys) -> None:
    assert convert.main([str(tmp_path / "missing"), str(tmp_path / "out")]) == 2
    assert "missing" in capsys.readouterr().err
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("keep")
    assert convert.main([str(source), str(precious)]) == 2
    assert "precious" in capsys.readouterr().err and (precious / "file").exists()


def test_fingerprint_is_of_content(source: Path, tmp_path: Path) -> None:
    before = source_fingerprint(source)
    shutil.copytree(source, tmp_path / "copy")
    assert source_fingerprint(tmp_path / "copy") == before
    (tmp_path / "copy" / "tokenizer.json").write_text("{ }")
    assert source_fingerprint(tmp_path / "copy") != before
