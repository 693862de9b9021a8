"""Hugging Face directories as they are found: odd but sound ones, and what is wrong with others."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import make_moe
from safetensors.torch import load_file, save_file

from miles_core.checkpoints.compare import ConversionError
from miles_core.checkpoints.convert import convert_to_torch_dist, export_to_hf
from miles_core.checkpoints.verify import verify
from miles_core.modeling.families import weights
from miles_core.modeling.hf_config import UnsupportedModel, read_spec
from miles_core.modeling.hf_weights import INDEX, HFReader

Tensors = dict[str, torch.Tensor]
Q, GATE = "model.layers.1.self_attn.q_proj.weight", "model.layers.0.mlp.gate_proj.weight"


def change(path: Path, edit: Callable[[Tensors], None]) -> Path:
    """Edit the tensors of a directory with one file."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return file


def shard(path: Path, count: int) -> None:
    """Spread the tensors over files with names of no meaning, under an index."""
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {name: f"part-{i % count}.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        held = {name: tensors[name] for name in names if files[name] == file}
        save_file(held, path / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": 1}, "weight_map": files}
    (path / INDEX).write_text(json.dumps(index))


def odd(tensors: Tensors) -> None:
    """Several dtypes, within one megatron parameter too; what old and new programs leave behind."""
    for number, name in enumerate(sorted(tensors)):
        if "correction_bias" not in name:
            kinds = (torch.bfloat16, torch.float16, torch.float32)
            tensors[name] = tensors[name].to(kinds[number % 3])
    tensors[GATE] = tensors[GATE].to(torch.bfloat16)
    tensors[GATE.replace("gate", "up")] = tensors[GATE.replace("gate", "up")].to(torch.float16)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    tensors["model.layers.2.eh_proj.weight"] = torch.ones(3, 3)  # of multi-token prediction
    tensors["model.layers.2.mlp.gate.weight"] = torch.ones(4, 32)


def test_an_odd_directory_is_converted_and_comes_back(tmp_path: Path) -> None:
    path = make_moe(tmp_path / "hf", "glm4_moe_lite")
    change(path, odd)
    shard(path, 3)
    torch.save({}, path / "pytorch_model.bin")
    save_file({"other": torch.ones(1)}, path / "consolidated.safetensors")  # not in the index
    result = convert_to_torch_dist(path, tmp_path / "converted")
    assert result.checked == "logits"
    found = verify(tmp_path / "converted", path)
    assert found.whole and "tensors" in [check.name for check in found.checks]
    export_to_hf(tmp_path / "converted", tmp_path / "back")
    source = {n: t for f in path.glob("part-*.safetensors") for n, t in load_file(f).items()}
    back = load_file(tmp_path / "back" / "model.safetensors")
    left = {name for name in source if "layers.2." in name or "inv_freq" in name}
    assert set(back) == set(source) - left and len(left) == 3
    for name, value in back.items():
        assert torch.equal(value, source[name].to(value.dtype)), name
        assert torch.promote_types(value.dtype, source[name].dtype) == value.dtype, name
    assert {str(value.dtype) for value in back.values()} == {
        "torch.bfloat16",
        "torch.float16",
        "torch.float32",
    }


def without(name: str) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        del tensors[name]

    return edit


def put(name: str, value: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        tensors[name] = value(tensors[name]).contiguous()

    return edit


@pytest.mark.parametrize(
    ("kind", "edit", "error", "texts"),
    [
        ("glm4_moe", without(Q), KeyError, ["hf", Q]),
        ("glm4_moe", put(Q, lambda x: x[:-1]), ValueError, ["model.safetensors", Q, "[63, 32]"]),
        ("glm4_moe", put(Q, lambda x: x.T), ValueError, ["model.safetensors", Q, "[64, 32]"]),
        ("qwen3_moe", put(Q, lambda x: x.to(torch.int8)), ValueError, [Q, "int8", "quantised"]),
        (
            "glm4_moe_lite",
            put("model.embed_tokens.weight", lambda x: x[1:]),
            ValueError,
            ["model.embed_tokens.weight", "[95, 32]", "[96, 32]"],
        ),
    ],
)
def test_a_tensor_that_does_not_fit_is_named_with_its_file(
    kind: str, edit: Callable[[Tensors], None], error: Any, texts: list[str], tmp_path: Path
) -> None:
    path = make_moe(tmp_path / "hf", kind)
    change(path, edit)
    with pytest.raises(error) as failure:
        convert_to_torch_dist(path, tmp_path / "converted")
    for text in texts:
        assert text in str(failure.value)
    assert not (tmp_path / "converted").exists()


def test_files_that_do_not_fit_together_are_named(tmp_path: Path) -> None:
    path = make_moe(tmp_path / "hf", "qwen3_moe")
    save_file({Q: torch.ones(1)}, path / "more.safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors and .*more\.safetensors hold"):
        HFReader(path)
    (path / "more.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1")
    with pytest.raises(ValueError, match=r"more\.safetensors is no safetensors file"):
        HFReader(path)
    (path / "more.safetensors").unlink()
    shard(path, 2)
    (path / "part-1.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"part-1\.safetensors does not exist"):
        HFReader(path)
    save_file({"x": torch.ones(1)}, path / "part-1.safetensors")
    with pytest.raises(ValueError, match=r"part-1\.safetensors holds no tensor 'model"):
        HFReader(path)
    (path / INDEX).write_text("[]")
    with pytest.raises(ValueError, match="weight_map"):
        HFReader(path)
    for file in path.glob("*.safetensors*"):
        file.unlink()
    torch.save({}, path / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"holds no \.safetensors file"):
        HFReader(path)


@pytest.mark.parametrize(
    ("kind", "fields", "text"),
    [
        ("qwen3_moe", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ("qwen3_moe", {"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
        ("qwen3_moe", {"rope_parameters": {"rope_type": "yarn"}}, "factor"),
        ("qwen3_moe", {"rope_parameters": {"rope_type": "linear", "factor": "2"}}, "factor"),
        ("qwen3_moe", {"rope_parameters": 3}, "rope_parameters"),
        ("qwen3_moe", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("qwen3_moe", {"attention_bias": True}, "attention_bias"),
        ("qwen3_moe", {"mlp_bias": True}, "mlp_bias"),
        ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window"),
        ("qwen3_moe", {"hidden_act": "gelu"}, "hidden_act"),
        ("qwen3_moe", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ("qwen3_moe", {"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ("qwen3_moe", {"num_key_value_heads": None}, "num_key_value_heads is missing"),
        ("qwen3_moe", {"head_dim": 7}, "head_dim 7"),
        ("qwen3_moe", {"num_experts_per_tok": 5}, "num_experts_per_tok 5"),
        ("qwen3_moe", {"num_experts_per_tok": 1}, "norm_topk_prob with num_experts_per_tok 1"),
        ("qwen3_moe", {"vocab_size": None}, "vocab_size is missing"),
        ("qwen3_moe", {"hidden_size": "32"}, "hidden_size"),
        ("qwen3_moe", {"num_hidden_layers": 0}, "num_hidden_layers"),
        ("qwen3_moe", {"rms_norm_eps": -1}, "rms_norm_eps"),
        ("qwen3_moe", {"model_type": "qwen2"}, "model_type 'qwen2'"),
        ("glm4_moe", {"n_group": 2}, "n_group"),
        ("glm4_moe", {"norm_topk_prob": False}, "norm_topk_prob"),
        ("glm4_moe", {"num_experts_per_tok": 1}, "num_experts_per_tok 1"),
        ("glm4_moe", {"n_shared_experts": -1}, "n_shared_experts"),
        ("glm4_moe", {"first_k_dense_replace": None}, "first_k_dense_replace"),
        ("glm4_moe", {"partial_rotary_factor": 0.2}, "partial_rotary_factor 0.2 of head_dim"),
        (
            "glm4_moe",
            {
                "rope_parameters": {"rope_type": "yarn", "factor": 4, "rope_theta": 1e4},
                "partial_rotary_factor": 0.5,
            },
            "attention_factor",
        ),
        ("glm4_moe_lite", {"rope_interleave": False}, "rope_interleave"),
        ("glm4_moe_lite", {"num_key_value_heads": 2}, "num_key_value_heads"),
        ("glm4_moe_lite", {"mlp_layer_types": ["sparse"]}, "mlp_layer_types"),
        ("glm4_moe_lite", {"kv_lora_rank": None}, "kv_lora_rank is missing"),
        ("glm4_moe_lite", {"rope_parameters": {"rope_type": "linear", "factor": 2}}, "rope_type"),
    ],
)
def test_a_field_that_cannot_be_computed_is_named_with_its_file(
    kind: str, fields: dict[str, Any], text: str, tmp_path: Path
) -> None:
    path = make_moe(tmp_path / "hf", kind) / "config.json"
    config = json.loads(path.read_text())
    if "partial_rotary_factor" in fields:
        config["rope_parameters"].pop("partial_rotary_factor", None)
    path.write_text(json.dumps(config | fields))
    with pytest.raises(UnsupportedModel) as failure:
        read_spec(path.parent)
    assert text in str(failure.value) and str(path) in str(failure.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_is_refused_in_every_tensor(
    tmp_path: Path, value: float
) -> None:
    """Also behind the layers whose logits are compared."""
    path = make_moe(tmp_path / "hf", "glm4_moe")
    whole = load_file(path / "model.safetensors")
    spec = read_spec(path)
    shapes = {name: tensor.shape for name, tensor in whole.items()}
    used = 0
    for weight in weights(spec):
        meta = [torch.empty(shapes[name], device="meta") for name in weight.theirs]
        shape = weight.cut.shard(meta, 0, 1).shape
        for name in weight.theirs:
            damaged = {**whole, name: whole[name].clone()}
            damaged[name].view(-1)[-1] = value
            file = path / "model.safetensors"
            save_file(damaged, file, metadata={"format": "pt"})
            with pytest.raises(ValueError, match=f"{file}: {name} holds values that are not fin"):
                HFReader(path).parts(weight, shape)
            used += 1
    assert used >= 30
    with pytest.raises(ValueError, match="not finite"):
        convert_to_torch_dist(path, tmp_path / "converted")


@pytest.mark.parametrize(
    ("field", "value"), [("rms_norm_eps", None), ("layer_types", ["full_attention"])]
)
def test_what_transformers_does_not_read_is_told(tmp_path: Path, field: str, value: Any) -> None:
    path = make_moe(tmp_path / "hf", "qwen3_moe")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, field: value}))
    with pytest.raises(ConversionError, match=f"transformers does not read {path}: .*{field}"):
        convert_to_torch_dist(path, tmp_path / "converted")
    assert not (tmp_path / "converted").exists()
