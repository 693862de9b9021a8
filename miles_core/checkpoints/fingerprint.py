"""Identity of a Hugging Face directory, by content."""

from __future__ import annotations

from pathlib import Path

from miles_core import digest
from miles_core.checkpoints.layout import is_hf_file
from miles_core.checkpoints.manifest import digests


def source_fingerprint(hf_dir: str | Path, like: str = "") -> str:
    """Algorithm and digest (hex) over names and bytes of what a conversion reads: configuration,
    tokenizer and safetensors. With `like`, an older fingerprint, by that one's algorithm.
    Raises FileNotFoundError when there is no directory."""
    directory = Path(hf_dir)
    if not directory.is_dir():
        raise FileNotFoundError(f"{directory} is not a directory")
    algorithm = "sha256" if like and ":" not in like else digest.ALGORITHM
    paths = [
        path
        for path in sorted(directory.iterdir())
        if is_hf_file(path) or (path.is_file() and path.suffix == ".safetensors")
    ]
    total = digest.new(algorithm)
    for path, content in zip(paths, digests(paths, algorithm), strict=True):
        total.update(f"{path.name}\0{content}\n".encode())
    return total.hexdigest() if algorithm == "sha256" else f"{algorithm}:{total.hexdigest()}"
