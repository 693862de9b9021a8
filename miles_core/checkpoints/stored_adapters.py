"""The adapters of a checkpoint: merged into the weights under them, or written as PEFT has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_core.checkpoints import adapters, manifest

if TYPE_CHECKING:
    import torch

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."


class StoredAdapters:
    """A and B of every adapter of a checkpoint, read when they are asked for."""

    def __init__(self, directory: Path, about: adapters.Adapters) -> None:
        from miles_core.modeling.shard_reader import ShardReader

        self._reader = ShardReader(directory)
        self._about = about
        self.names = sorted(
            name for name in self._reader.index.state_dict_metadata if name.startswith(_PREFIX)
        )

    def tensor(self, name: str) -> torch.Tensor:
        """A or B [r, in] or [out, r] under PEFT's name, in the stored dtype."""
        return self._reader.tensor(name)

    def merged(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """The Hugging Face tensor `name` with its adapter, if it has one; in the same dtype."""
        from miles_core.modeling.lora_layers import delta_weight, merged_weight

        module = f"{_PREFIX}{name.removesuffix('.weight')}"
        if f"{module}.lora_A.weight" not in self.names:
            return weight
        a, b = (self.tensor(f"{module}.lora_{x}.weight") for x in "AB")
        return merged_weight(weight, delta_weight(a, b, self._about.alpha / self._about.rank))


def _peft_config(about: adapters.Adapters) -> dict[str, Any]:
    """What PEFT needs to know; the names are its own."""
    alpha = int(about.alpha) if about.alpha.is_integer() else about.alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": about.rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": about.modules,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "modules_to_save": None,
        "use_rslora": False,
    }


def export_adapter(source: str | Path, out_dir: str | Path, dtype: str | None = None) -> list[str]:
    """Write the adapters of a checkpoint as a directory that PEFT loads; names of its files.

    Raises FileExistsError when `out_dir` exists and is not empty, and ValueError when the
    checkpoint holds no adapters or is damaged.
    """
    import torch
    from safetensors.torch import save_file

    source = Path(source)
    about = adapters.read(source)
    if about is None:
        raise ValueError(f"{source} holds no adapters but a whole model; leave --adapter out")
    problem = manifest.verify(source)
    if problem is not None:
        raise ValueError(f"{source}: {problem}")
    stored = StoredAdapters(source, about)
    kind = None if dtype is None else getattr(torch, dtype)
    with manifest.new_directory(Path(out_dir)) as directory:
        tensors = {name: stored.tensor(name) for name in stored.names}
        if kind is not None:
            tensors = {name: tensor.to(kind) for name, tensor in tensors.items()}
        save_file(tensors, directory / WEIGHTS_FILE, metadata={"format": "pt"})
        (directory / WEIGHTS_FILE).chmod(0o644)
        config = json.dumps(_peft_config(about), indent=2) + "\n"
        (directory / CONFIG_FILE).write_text(config)
    return [CONFIG_FILE, WEIGHTS_FILE]
