"""Weights as ranks stream them: the source's bits, in bounded buckets, in bounded memory."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from rank_helpers import fork_ranks
from safetensors.torch import load_file
from trainer_helpers import CONFIG, make_hf

from miles_core.training.worker import TrainerWorker

sys.path.insert(0, str(Path(__file__).parents[1] / "modeling"))
from family_models import make_moe  # noqa: E402

BUCKET = 65536
MIB = 2**20


def run(out: Path, world: int, cases: dict[str, Any]) -> list[dict[str, Any]]:
    """The answers of each rank."""
    return fork_ranks("stream_process", world, out, cases)


def make_wide(directory: Path) -> Path:
    """64 MiB in weights of at most 4 MiB."""
    config = transformers.Qwen3Config(
        vocab_size=1024,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=64,
        tie_word_embeddings=False,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


def test_layouts_stream_the_bits_of_the_source(tmp_path: Path) -> None:
    dense = str(make_hf(tmp_path / "dense", tied=False))
    tied = str(make_hf(tmp_path / "tied"))
    sparse = str(make_moe(tmp_path / "sparse", "qwen3_moe"))
    latent = str(make_moe(tmp_path / "latent", "glm4_moe_lite"))
    small, wide = {"update_weight_buffer_size": BUCKET}, str(make_wide(tmp_path / "wide"))
    sp = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    tp, pp = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
    ep = {"expert_model_parallel_size": 2}
    cases = {
        "tp": {"hf": dense, "changes": {**small, **tp}},
        "pp tied": {"hf": tied, "changes": {**small, **pp}},
        "ep": {"hf": sparse, "changes": {**small, **ep}},
        "tp latent": {"hf": latent, "changes": {**small, **sp}},
        "pp bfloat16": {"hf": latent, "changes": {**small, **pp}, "dtype": "bfloat16"},
        "memory": {
            "hf": wide,
            "changes": {"update_weight_buffer_size": 4 * MIB, **tp},
            "compare": False,
        },
    }
    answers = run(tmp_path / "out", 2, cases)
    for name, answer in answers[0].items():
        assert answer["wrong"] == [], name
        assert len(answer["names"]) == len(set(answer["names"])), name
        source = load_file(Path(cases[name]["hf"]) / "model.safetensors")
        assert set(answer["names"]) == set(source), name
        limit = cases[name]["changes"]["update_weight_buffer_size"]
        # Tensors that are one weight of the trainer, such as q, k and v, come together.
        for size, count in zip(answer["sizes"], answer["counts"], strict=True):
            assert size <= limit or count <= 3, name
        if name not in ("pp bfloat16", "memory"):
            assert len(answer["sizes"]) > 1, name
    first, second = (answer["memory"] for answer in answers)
    assert sum(first["sizes"]) > 60 * MIB
    # A bucket, and the weight that is put together with its shards: 4 + 2 * 4 MiB.
    assert first["grown"] < 20 * MIB
    # The other rank has one shard in its hands.
    assert second["grown"] < 8 * MIB


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_an_export_is_the_source_again(tmp_path: Path, dtype: str | None) -> None:
    hf = make_hf(tmp_path / "hf", tied=False)
    worker = TrainerWorker(CONFIG)
    try:
        worker.init_from_hf(str(hf))
        worker.export_hf(str(tmp_path / "out"), dtype)
    finally:
        worker.close()
    source = load_file(hf / "model.safetensors")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert set(found) == set(source)
    for name, tensor in source.items():
        assert torch.equal(found[name], tensor.to(found[name].dtype)), name
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == (dtype or "float32")
    assert {str(t.dtype) for t in found.values()} == {f"torch.{dtype or 'float32'}"}
