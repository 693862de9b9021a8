"""Identity of a Hugging Face directory, by content."""

from __future__ import annotations

import hashlib
from pathlib import Path

from miles_core.checkpoints.layout import is_hf_file
from miles_core.checkpoints.manifest import digests


def source_fingerprint(hf_dir: str | Path) -> str:
    """SHA-256 (hex) over names and bytes of what a conversion reads: configuration, tokenizer and
    safetensors. Raises FileNotFoundError when there is no directory."""
    directory = Path(hf_dir)
    if not directory.is_dir():
        raise FileNotFoundError(f"{directory} is not a directory")
    paths = [
        path
        for path in sorted(directory.iterdir())
        if is_hf_file(path) or (path.is_file() and path.suffix == ".safetensors")
    ]
    total = hashlib.sha256()
    for path, content in zip(paths, digests(paths), strict=True):
        total.update(f"{path.name}\0{content}\n".encode())
    return total.hexdigest()
