"""Checks of a Hugging Face directory that need neither torch nor the weights themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from miles_core.engines.shape import ModelDirectoryError, read_json, read_shape
from miles_core.modeling.hf_config import UnsupportedModel, read_spec

_INDEX = "model.safetensors.index.json"
# A safetensors file starts with the length of its JSON header, as a little-endian number.
_LENGTH_BYTES = 8
_LARGEST_HEADER = 100_000_000


def model_faults(directory: Path, embedded_engine: bool = True) -> list[str]:
    """What makes a model directory unusable: a configuration that the trainer cannot read, a
    missing or broken tokenizer, missing or cut weights; with `embedded_engine` also a model that
    the embedded engine does not serve. Each fault names its file."""
    faults = _configuration_faults(directory, embedded_engine)
    try:
        _check_tokenizer(directory)
    except ModelDirectoryError as error:
        faults.append(error.message)
    try:
        files = _weight_files(directory)
    except ModelDirectoryError as error:
        return [*faults, error.message]
    return faults + [fault for file in files if (fault := _weight_fault(file))]


def _configuration_faults(directory: Path, embedded_engine: bool) -> list[str]:
    """Of config.json: for the trainer, and for the embedded engine where it is used."""
    try:
        read_json(directory / "config.json")
    except ModelDirectoryError as error:
        return [error.message]
    try:
        read_spec(directory)
    except UnsupportedModel as error:
        return [str(error)]
    if embedded_engine:
        try:
            read_shape(directory)
        except ModelDirectoryError as error:
            return [
                f"the embedded engine does not serve this model: {error.message}"
                + (f" ({error.fix})" if error.fix else "")
                + "; serve it with SGLang and set --engine-urls"
            ]
    return []


def _check_tokenizer(directory: Path) -> None:
    read_json(directory / "tokenizer.json")
    for name in ("tokenizer_config.json", "generation_config.json"):
        if (directory / name).exists():
            read_json(directory / name)


def _weight_files(directory: Path) -> list[Path]:
    index = directory / _INDEX
    if index.exists():
        names = read_json(index).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise ModelDirectoryError(f"{index}: field weight_map must name the files")
        return [directory / name for name in sorted(set(names.values()))]
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ModelDirectoryError(f"{directory} holds no .safetensors file")
    return files


def _weight_fault(file: Path) -> str | None:
    """Whether a file is shorter than its header says, or has none."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
            if not 0 < length <= min(size - _LENGTH_BYTES, _LARGEST_HEADER):
                return f"{file} is cut off or is no safetensors file"
            header: dict[str, Any] = json.loads(stream.read(length))
        tensors = [entry for name, entry in header.items() if name != "__metadata__"]
        expected = _LENGTH_BYTES + length + max((t["data_offsets"][1] for t in tensors), default=0)
    except FileNotFoundError:
        return f"{file} does not exist"
    except OSError as error:
        return f"{file} cannot be read: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return f"{file} is no safetensors file: its header cannot be read"
    if size != expected:
        return f"{file} has {size} bytes where its header says {expected}; download it again"
    return None
