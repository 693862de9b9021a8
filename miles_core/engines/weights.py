"""Weights of a dense decoder, read from safetensors, with q/k/v and gate/up fused."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from miles_core.engines.shape import ModelDirectoryError, ModelShape, read_json, read_shape

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Layer:
    """One decoder layer; every matrix is [out, in]."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: torch.Tensor
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True)
class Weights:
    """All weights of a model: `embedding` and `head` are [vocab, hidden] (one tensor when tied)."""

    embedding: torch.Tensor
    layers: list[Layer]
    norm: torch.Tensor
    head: torch.Tensor


class _Reader:
    """Named tensors of a directory, with their shapes checked."""

    def __init__(self, directory: Path, dtype: torch.dtype) -> None:
        self.directory = directory
        self.dtype = dtype
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

    def get(self, name: str, *size: int) -> torch.Tensor:
        """A tensor of that name and size, as a private copy in the engine's type."""
        path = self.where.get(name)
        if path is None:
            raise ModelDirectoryError(f"{self.directory}: tensor {name} is missing")
        try:
            tensor = self._open(path).get_tensor(name)
        except SafetensorError as error:
            raise ModelDirectoryError(f"{path}: tensor {name}: {error}") from error
        if tuple(tensor.shape) != size:
            raise ModelDirectoryError(
                f"{path}: tensor {name} has shape {tuple(tensor.shape)}, expected {size}"
            )
        return tensor.to(self.dtype, copy=True)


def _layer(reader: _Reader, shape: ModelShape, index: int) -> Layer:
    prefix = f"model.layers.{index}."
    hidden, inner = shape.hidden, shape.intermediate
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = prefix + "self_attn."
    return Layer(
        input_norm=reader.get(prefix + "input_layernorm.weight", hidden),
        qkv=torch.cat(
            [
                reader.get(attention + "q_proj.weight", q, hidden),
                reader.get(attention + "k_proj.weight", kv, hidden),
                reader.get(attention + "v_proj.weight", kv, hidden),
            ]
        ),
        q_norm=reader.get(attention + "q_norm.weight", shape.head_dim) if shape.qk_norm else None,
        k_norm=reader.get(attention + "k_norm.weight", shape.head_dim) if shape.qk_norm else None,
        out=reader.get(attention + "o_proj.weight", hidden, q),
        post_norm=reader.get(prefix + "post_attention_layernorm.weight", hidden),
        gate_up=torch.cat(
            [
                reader.get(prefix + "mlp.gate_proj.weight", inner, hidden),
                reader.get(prefix + "mlp.up_proj.weight", inner, hidden),
            ]
        ),
        down=reader.get(prefix + "mlp.down_proj.weight", hidden, inner),
    )


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
    reader = _Reader(directory, dtype)
    embedding = reader.get("model.embed_tokens.weight", shape.vocab, shape.hidden)
    weights = Weights(
        embedding=embedding,
        layers=[_layer(reader, shape, index) for index in range(shape.layers)],
        norm=reader.get("model.norm.weight", shape.hidden),
        head=embedding if shape.tied else reader.get("lm_head.weight", shape.vocab, shape.hidden),
    )
    _check_finite(weights, directory)
    return weights


def _check_finite(weights: Weights, directory: Path) -> None:
    tensors = {"embedding": weights.embedding, "norm": weights.norm, "head": weights.head}
    for index, layer in enumerate(weights.layers):
        for name in (
            "qkv",
            "out",
            "gate_up",
            "down",
            "input_norm",
            "post_norm",
            "q_norm",
            "k_norm",
        ):
            if getattr(layer, name) is not None:
                tensors[f"layer {index} {name}"] = getattr(layer, name)
    for name, tensor in tensors.items():
        # A sum is finite only if no element is infinite or NaN, and needs no second array.
        if not torch.isfinite(tensor.sum(dtype=torch.float64)):
            raise ModelDirectoryError(f"{directory}: {name} holds values that are not finite")
