"""Names inside a torch_dist directory of ours."""

from __future__ import annotations

import shutil
from pathlib import Path

HF_DIR = "hf"
STATE_FILE = "miles_state.json"
LORA_FILE = "LORA.json"
MANIFEST_FILE = "MANIFEST.json"
TRACKER_FILE = "latest_checkpointed_iteration.txt"

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".safetensors.index.json")


def is_hf_file(path: Path) -> bool:
    """Whether a file of a Hugging Face directory is configuration or tokenizer, not weights."""
    return path.is_file() and not path.name.startswith(".") and not path.name.endswith(_WEIGHTS)


def copy_hf_files(source: Path, target: Path) -> None:
    """Copy configuration and tokenizer files, so that a directory stands on its own."""
    target.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if is_hf_file(path):
            shutil.copyfile(path, target / path.name)
