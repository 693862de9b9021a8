"""Hugging Face tensors into this rank's megatron parameters."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open

from miles_core.modeling import parallel
from miles_core.modeling.families import EMBEDDING, weights
from miles_core.modeling.gpt import PolicyModel
from miles_core.modeling.hf_config import ModelSpec
from miles_core.modeling.mapping import Weight

INDEX = "model.safetensors.index.json"
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class HFReader:
    """Tensors of a Hugging Face directory by name, read when they are asked for.

    An index says which file holds which tensor; without one all safetensors files are read. Raises
    FileNotFoundError for a directory without weights or an index whose files are not there, and
    ValueError, naming the file, for one that cannot be read or holds a tensor that another holds.
    """

    def __init__(self, hf_dir: str | Path) -> None:
        self._dir = Path(hf_dir)
        index = self._dir / INDEX
        self._file_of = self._from_index(index) if index.is_file() else self._from_files()

    def _from_index(self, index: Path) -> dict[str, Path]:
        try:
            table = json.loads(index.read_text())["weight_map"]
            file_of = {str(name): self._dir / str(file) for name, file in table.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{index}: weight_map must say which file holds which tensor"
            ) from error
        held = {file: set(self._open(file).keys()) for file in sorted(set(file_of.values()))}
        for name, file in file_of.items():
            if name not in held[file]:
                raise ValueError(
                    f"{file} holds no tensor {name!r}, which {index.name} says it does"
                )
        return file_of

    def _from_files(self) -> dict[str, Path]:
        file_of: dict[str, Path] = {}
        for file in sorted(self._dir.glob("*.safetensors")):
            for name in list(self._open(file).keys()):
                if name in file_of:
                    raise ValueError(
                        f"both {file_of[name]} and {file} hold {name!r}, and there is no {INDEX}"
                    )
                file_of[name] = file
        if not file_of:
            raise FileNotFoundError(f"{self._dir} holds no .safetensors file")
        return file_of

    @staticmethod
    def _open(file: Path) -> Any:
        if not file.is_file():
            raise FileNotFoundError(f"{file} does not exist")
        try:
            return safe_open(file, framework="pt")
        except SafetensorError as error:
            raise ValueError(f"{file} is no safetensors file: {error}") from None

    def __call__(self, name: str) -> torch.Tensor:
        """Raises KeyError, naming the tensor, and ValueError for numbers that are no weights."""
        file = self._file_of.get(name)
        if file is None:
            raise KeyError(f"{self._dir} holds no tensor {name!r}")
        with self._open(file) as reader:
            tensor: torch.Tensor = reader.get_tensor(name)
        if tensor.dtype not in _DTYPES:
            raise ValueError(
                f"{file}: {name} has {tensor.dtype}; quantised weights are not supported"
            )
        return tensor

    def parts(self, weight: Weight, shape: Sequence[int], ranks: int = 1) -> list[torch.Tensor]:
        """The tensors of a weight that has `shape` on each of `ranks` ranks that it is cut over.

        Raises ValueError, naming file and tensor, for one of another shape, or with a value that
        is not finite: no step could be trained on it.
        """
        wanted = weight.cut.whole([torch.empty(tuple(shape), device="meta")] * ranks)
        parts = [self(name) for name in weight.theirs]
        for name, part, like in zip(weight.theirs, parts, wanted, strict=True):
            if part.shape != like.shape:
                raise ValueError(
                    f"{self._file_of[name]}: {name} has shape {list(part.shape)}, and by "
                    f"config.json {list(like.shape)}"
                )
            if not torch.isfinite(torch.stack(part.aminmax())).all():
                raise ValueError(f"{self._file_of[name]}: {name} holds values that are not finite")
        return parts


def own_tensors(model: PolicyModel) -> dict[str, torch.Tensor]:
    """Parameters and router biases of this rank under their names in the whole model, without
    adapters."""
    return {model.global_name(name): tensor for name, tensor in model.stored_tensors()}


def cutting_group(weight: Weight) -> dist.ProcessGroup:
    """The ranks that a weight is cut over."""
    return parallel.expert_tp_group() if weight.expert else parallel.tp_group()


@torch.no_grad()
def load_hf(
    model: PolicyModel, spec: ModelSpec, reader: HFReader, leave_out: str | None = None
) -> None:
    """Fill the model from Hugging Face tensors, but for the parameter called `leave_out`.

    Raises KeyError or ValueError, naming the tensor, for one that is missing or has another shape.
    """
    own = own_tensors(model)
    own.pop(leave_out or "", None)

    def put(name: str, weight: Weight) -> None:
        target = own.pop(name)
        group = cutting_group(weight)
        parts = reader.parts(weight, target.shape, group.size())
        target.copy_(weight.cut.shard(parts, group.rank(), group.size()))

    for weight in weights(spec):
        names = [weight.ours]
        if spec.tied and weight.ours == EMBEDDING:
            names.append("output_layer.weight")  # once more, on the last pipeline stage
        for name in names:
            if name in own:
                put(name, weight)
    if own:
        raise ValueError(f"no Hugging Face tensor fills {sorted(own)}")
