"""Conversion weight by weight: megatron's own layout, resumable, any model family."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from trainer_helpers import make_hf

sys.path.insert(0, str(Path(__file__).parent.parent / "modeling"))
from family_models import make_moe  # noqa: E402
from megatron.core import dist_checkpointing  # noqa: E402

from miles_core.checkpoints import convert, stream  # noqa: E402
from miles_core.checkpoints.convert import convert_to_torch_dist, export_to_hf  # noqa: E402
from miles_core.modeling import dist_state, parallel  # noqa: E402
from miles_core.modeling.gpt import build_model  # noqa: E402
from miles_core.modeling.hf_config import read_spec  # noqa: E402
from miles_core.modeling.hf_weights import HFReader, load_hf  # noqa: E402
from miles_core.modeling.shard_reader import read_index  # noqa: E402

FAMILIES = (
    "qwen3",
    "qwen3_moe",
    "glm4_moe_lite",
    pytest.param("llama", marks=pytest.mark.slow),
    pytest.param("glm4_moe", marks=pytest.mark.slow),
)


def source_of(kind: str, directory: Path) -> Path:
    dense = kind in ("qwen3", "llama")
    return make_hf(directory, kind, tied=False) if dense else make_moe(directory, kind)


def described(directory: Path) -> dict[str, Any]:
    """Shape and regions of each tensor by name; objects by name alone."""
    index = read_index(directory).state_dict_metadata
    return {
        key: (tuple(entry.size), sorted((tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks))
        if hasattr(entry, "chunks")
        else None
        for key, entry in index.items()
    }


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_conversion_is_laid_out_as_megatron_saves(kind: str, tmp_path: Path) -> None:
    hf = source_of(kind, tmp_path / "hf")
    result = convert_to_torch_dist(hf, tmp_path / "out")
    assert result.checked == "logits" and result.logit_difference is not None
    (tmp_path / "saved").mkdir()
    parallel.start(0, 1, "127.0.0.1", 0, 1, seed=0)
    try:
        model = build_model(read_spec(hf), 1, torch.float32)
        load_hf(model, read_spec(hf), HFReader(hf))
        dist_state.save(tmp_path / "saved", model)
        wanted = {"model": model.sharded_state_dict()}
        source = {name: value.clone() for name, value in model.stored_tensors()}
        with torch.no_grad():
            for _, value in model.stored_tensors():
                value.zero_()
        loaded = dist_checkpointing.load(wanted, str(tmp_path / "out"))["model"]
        assert all(torch.equal(loaded[name], value) for name, value in source.items())
    finally:
        parallel.stop()
    assert described(tmp_path / "out") == described(tmp_path / "saved")

    files = export_to_hf(tmp_path / "out", tmp_path / "back", shard_bytes=20_000)
    assert len(files) > 2
    weight_map = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    got: dict[str, torch.Tensor] = {}
    for file in files:
        tensors = load_file(tmp_path / "back" / file)
        assert all(weight_map["weight_map"][name] == file for name in tensors)
        got |= tensors
    read = HFReader(hf)
    assert all(torch.equal(value, read(name)) for name, value in got.items())
    back = convert_to_torch_dist(tmp_path / "back", tmp_path / "again", check="tensors")
    assert back.checked == "tensors" and back.logit_difference is None
    assert shards(tmp_path / "again") == shards(tmp_path / "out")


def shards(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.glob("*.distcp")}


class Stopped(Exception):
    pass


def stop_after(files: int) -> Any:
    def report(progress: stream.Progress) -> None:
        if progress.done == files:
            raise Stopped

    return report


def test_an_interrupted_conversion_goes_on_behind_its_complete_files(tmp_path: Path) -> None:
    hf = make_hf(tmp_path / "hf", tied=False)
    convert_to_torch_dist(hf, tmp_path / "whole")
    partial = tmp_path / ".partial-out"
    with pytest.raises(Stopped):
        convert_to_torch_dist(hf, tmp_path / "out", workers=1, report=stop_after(3))
    assert not (tmp_path / "out").exists()
    before = {path.name: path.stat().st_ino for path in partial.glob("*.distcp")}
    stamps = {path.name: path.stat().st_mtime_ns for path in partial.glob("*.distcp")}
    assert len(before) >= 3
    damaged = partial / "__0_1.distcp"
    content = damaged.read_bytes()
    damaged.write_bytes(content[:-5] + b"12345")
    with open(partial / stream.PROGRESS_FILE, "a") as file:
        file.write('{"number": 4, "file"')  # a line that a kill cut off
    seen: list[stream.Progress] = []
    convert_to_torch_dist(hf, tmp_path / "out", workers=1, report=seen.append)
    assert seen[0].done == 2 and seen[0].bytes_done == 0  # the damaged one is made again
    assert seen[-1].done == seen[-1].total and seen[-1].seconds_left == 0
    assert shards(tmp_path / "out") == shards(tmp_path / "whole")
    after = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out").glob("*.distcp")}
    assert {name for name in stamps if after[name] == stamps[name]} == {
        "__0_0.distcp",
        "__0_2.distcp",
    }
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "out", "whole"]


def test_another_source_does_not_go_on_where_one_was_interrupted(tmp_path: Path) -> None:
    hf = make_hf(tmp_path / "hf")
    with pytest.raises(Stopped):
        convert_to_torch_dist(hf, tmp_path / "out", report=stop_after(2))
    tensors = load_file(hf / "model.safetensors")
    tensors["model.embed_tokens.weight"] += 1
    save_file(tensors, hf / "model.safetensors", metadata={"format": "pt"})
    seen: list[stream.Progress] = []
    convert_to_torch_dist(hf, tmp_path / "out", report=seen.append)
    assert seen[0].done == 1


def test_two_at_once_into_one_place_are_refused(tmp_path: Path) -> None:
    hf = make_hf(tmp_path / "hf")
    with (
        stream.unfinished(tmp_path / "out", "other"),
        pytest.raises(stream.Busy, match="another process"),
    ):
        convert_to_torch_dist(hf, tmp_path / "out")


def test_dtypes_are_kept_and_can_be_changed_on_the_way_out(tmp_path: Path) -> None:
    hf = make_hf(tmp_path / "hf", tied=False)
    tensors = load_file(hf / "model.safetensors")
    half = {name: value.bfloat16() for name, value in tensors.items()}
    save_file(half, hf / "model.safetensors", metadata={"format": "pt"})
    result = convert_to_torch_dist(hf, tmp_path / "out")
    assert result.checked == "logits"
    export_to_hf(tmp_path / "out", tmp_path / "same")
    export_to_hf(tmp_path / "out", tmp_path / "wide", dtype="float32")
    for name, kind in (("same", torch.bfloat16), ("wide", torch.float32)):
        got = load_file(tmp_path / name / "model.safetensors")
        assert set(got) == set(half)
        assert all(got[n].dtype == kind and torch.equal(got[n].bfloat16(), half[n]) for n in half)
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert config["dtype"] == str(kind).removeprefix("torch.")


def test_a_wrong_mapping_is_seen_without_logits_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from miles_core.modeling import mapping

    hf = make_hf(tmp_path / "hf")
    monkeypatch.setattr(mapping, "_join_qkv", lambda q, k, v, spec: torch.cat([k, q, v]))
    with pytest.raises(convert.ConversionError, match="tensors of the converted"):
        convert_to_torch_dist(hf, tmp_path / "out", check="tensors")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf"]


def test_logits_are_compared_only_where_they_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from miles_core.checkpoints import compare

    monkeypatch.setattr(compare, "available_memory", lambda: 1000)
    result = convert_to_torch_dist(make_hf(tmp_path / "hf"), tmp_path / "out")
    assert result.checked == "tensors"


MEMORY = """
import resource, sys
from pathlib import Path
from miles_core.checkpoints.convert import convert_to_torch_dist, export_to_hf
from miles_core.modeling import shard_map
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
hf, out = Path(sys.argv[1]), Path(sys.argv[2])
tiny = Path(sys.argv[3])
convert_to_torch_dist(tiny, out / "tiny", check="tensors")
export_to_hf(out / "tiny", out / "tiny-back")
before = peak()
convert_to_torch_dist(hf, out / "big", check="tensors", workers=1)
export_to_hf(out / "big", out / "back")
print(peak() - before)
"""


@pytest.mark.slow
def test_memory_is_that_of_the_largest_weight_not_of_the_model(tmp_path: Path) -> None:
    """About 190 MB of weights, of which the largest have 8 MB."""
    import os
    import subprocess

    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=2048,
        hidden_size=1024,
        intermediate_size=2048,
        num_hidden_layers=5,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=128,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "hf")
    size = (tmp_path / "hf" / "model.safetensors").stat().st_size
    assert size > 180e6
    tiny = make_hf(tmp_path / "tiny")
    (tmp_path / "out").mkdir()
    argv = [sys.executable, "-c", MEMORY, *map(str, (tmp_path / "hf", tmp_path / "out", tiny))]
    answer = subprocess.run(argv, capture_output=True, text=True, env=os.environ, check=True)
    grown = int(answer.stdout.split()[-1])
    # source parts, the joined weight, a piece, and the safetensors pages of one weight
    assert grown < 90e6, f"{grown / 1e6:.0f} MB for {size / 1e6:.0f} MB of weights"
