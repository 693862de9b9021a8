"""Where reference and critic start from is looked at before anything starts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from miles_core.checkpoints import manifest
from miles_core.preflight.starting_points import directory_fault, other_model_fault

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "intermediate_size": 16,
    "vocab_size": 10,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}


@pytest.fixture
def converted(tmp_path: Path) -> Path:
    """What a conversion looks like from outside."""
    directory = tmp_path / "converted"
    (directory / "hf").mkdir(parents=True)
    (directory / "hf" / "config.json").write_text(json.dumps(CONFIG))
    (directory / "metadata.json").write_text("{}")
    (directory / "__0_0.distcp").write_bytes(bytes(64))
    manifest.seal(directory, kind="conversion", fingerprint="x")
    return directory


def flip(directory: Path) -> None:
    (directory / "__0_0.distcp").write_bytes(bytes(63) + b"\1")


def as_checkpoint_without_manifest(directory: Path) -> None:
    (directory / "miles_state.json").write_text("{}")
    (directory / "MANIFEST.json").unlink()


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a bit": (flip, "__0_0.distcp was changed"),
    "cut": (lambda d: (d / "__0_0.distcp").write_bytes(b""), "__0_0.distcp has 0 bytes, not 64"),
    "lost": (lambda d: (d / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
    "manifest": (lambda d: (d / "MANIFEST.json").write_text("{"), "MANIFEST.json is missing or"),
    "unsealed": (as_checkpoint_without_manifest, "MANIFEST.json is missing or unreadable"),
    "no index": (lambda d: (d / "metadata.json").unlink(), "is no torch_dist directory"),
}


@pytest.mark.parametrize("name", ["ref_load", "critic_load"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_directory_is_found(converted: Path, name: str, damage: str) -> None:
    assert directory_fault(converted, name) is None
    change, told = DAMAGES[damage]
    change(converted)
    fault = directory_fault(converted, name)
    assert fault is not None and told in fault and str(converted) in fault


def test_other_directories_are_told_apart(converted: Path, tmp_path: Path) -> None:
    fault = directory_fault(converted / "hf", "ref_load")
    assert fault is not None and "miles checkpoint convert" in fault
    shutil.copytree(converted, tmp_path / "all" / "iter_0000003")
    fault = directory_fault(tmp_path / "all", "critic_load")
    assert fault is not None and "iter_0000003" in fault


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", 2),
        ("vocab_size", 12),
        ("rope_theta", 5e5),
        ("rms_norm_eps", 1e-6),
        ("tie_word_embeddings", True),
        ("num_key_value_heads", 1),
    ],
)
def test_a_model_that_computes_otherwise_is_refused(
    converted: Path, tmp_path: Path, field: str, value: float
) -> None:
    policy = tmp_path / "policy"
    shutil.copytree(converted / "hf", policy)
    assert other_model_fault(converted, policy) is None
    (policy / "config.json").write_text(json.dumps({**CONFIG, "max_position_embeddings": 128}))
    assert other_model_fault(converted, policy) is None
    (policy / "config.json").write_text(json.dumps({**CONFIG, field: value}))
    fault = other_model_fault(converted, policy)
    assert fault is not None and "instead of" in fault
