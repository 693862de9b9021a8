"""Weights of a Hugging Face directory, read tensor by tensor from its safetensors files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from miles_core.engines.shape import ModelDirectoryError, ModelShape, read_json, read_shape
from miles_core.engines.weights import Staging, WeightError, Weights, slots


class _Reader:
    """Named tensors of a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.files: dict[Path, Any] = {}
        self.where = self._index()

    def _index(self) -> dict[str, Path]:
        index = self.directory / "model.safetensors.index.json"
        if index.exists():
            names = read_json(index).get("weight_map")
            if not isinstance(names, dict):
                raise ModelDirectoryError(f"{index}: field weight_map must be an object")
            return {name: self.directory / file for name, file in names.items()}
        single = self.directory / "model.safetensors"
        if not single.exists():
            raise ModelDirectoryError(
                f"{self.directory} holds neither model.safetensors nor {index.name}",
                "give a Hugging Face model directory with safetensors weights",
            )
        return dict.fromkeys(self._open(single).keys(), single)

    def _open(self, path: Path) -> Any:
        if path not in self.files:
            try:
                self.files[path] = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ModelDirectoryError(f"{path} cannot be read: {error}") from error
        return self.files[path]

    def get(self, name: str) -> torch.Tensor:
        """A tensor of that name, which may lie in the file."""
        path = self.where.get(name)
        if path is None:
            raise ModelDirectoryError(f"{self.directory}: tensor {name} is missing")
        try:
            tensor: torch.Tensor = self._open(path).get_tensor(name)
        except SafetensorError as error:
            raise ModelDirectoryError(f"{path}: tensor {name}: {error}") from error
        return tensor


def load_weights(directory: Path, shape: ModelShape, dtype: torch.dtype) -> Weights:
    """Read every weight of `directory`, whose configuration must have the sizes of `shape`.

    Nothing is kept of a directory that is incomplete, of other sizes, or not finite.

    Raises:
        ModelDirectoryError: naming the file and the field or tensor that is wrong.
    """
    found = read_shape(directory)
    if found != shape:
        differing = [
            name
            for name in shape.__dataclass_fields__
            if getattr(found, name) != getattr(shape, name)
        ]
        raise ModelDirectoryError(
            f"{directory / 'config.json'}: {', '.join(differing)} differ from the served model"
        )
    reader = _Reader(directory)
    staging = Staging(shape, dtype)
    for name in slots(shape):
        tensor = reader.get(name)
        try:
            staging.put(name, tensor)
        except WeightError as error:
            raise ModelDirectoryError(f"{reader.where[name]}: {error}") from error
    return staging.finish()
