"""Checkpoints of adapters: the frozen model they belong to is named, not written again.

`LORA.json` in such a checkpoint says which adapters it holds and of which model. The model is known
by the fingerprint of its Hugging Face directory, so that any conversion of that will do.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from miles_core.checkpoints import manifest
from miles_core.checkpoints.fingerprint import source_fingerprint
from miles_core.checkpoints.layout import LORA_FILE


@dataclass(frozen=True)
class Adapters:
    """Rank, alpha and layers of the adapters; fingerprint and path of the model under them."""

    rank: int
    alpha: float
    modules: list[str]
    base_fingerprint: str
    base: str


def read(directory: str | Path) -> Adapters | None:
    """The adapters that a checkpoint holds, or None when it holds a whole model."""
    path = Path(directory) / LORA_FILE
    return Adapters(**json.loads(path.read_text())) if path.is_file() else None


def write(directory: str | Path, adapters: Adapters) -> None:
    """Say what a checkpoint holds."""
    (Path(directory) / LORA_FILE).write_text(json.dumps(asdict(adapters), indent=1) + "\n")


def model_fingerprint(directory: str | Path, like: str = "") -> str:
    """Fingerprint of a model that nothing was trained of: a conversion, which knows that of its
    source, or a Hugging Face directory (made as `like` was). Raises ValueError for anything else.
    """
    if not (Path(directory) / "metadata.json").is_file():
        return source_fingerprint(directory, like)
    known = (manifest.read(Path(directory)) or {}).get("fingerprint")
    if not isinstance(known, str):
        raise ValueError(
            f"{directory} is not a converted model; adapters are trained on one. `miles checkpoint "
            "export` and `convert` make one from a checkpoint"
        )
    return known


def find_base(load: str | Path, given: str | Path | None) -> Path:
    """The model under the adapters that are to be loaded from `load`, or begun on it.

    `given` says where it is; without it, `load` itself or where it was when the checkpoint was
    saved. Raises ValueError when there is none, or it is another model.
    """
    adapters = read(load)
    base = Path(given or (load if adapters is None else adapters.base))
    wanted = model_fingerprint(load) if adapters is None else adapters.base_fingerprint
    if not base.is_dir():
        raise ValueError(
            f"{load} holds adapters of the model {base}, which is not there; convert that model "
            "again, or say where it is"
        )
    if model_fingerprint(base, like=wanted) != wanted:
        raise ValueError(f"{base} is not the model that the adapters of {load} belong to")
    return base
