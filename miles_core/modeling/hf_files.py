"""Hugging Face weight files, written from a stream of buckets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from miles_core.modeling.weight_stream import Entry, WeightStream
from miles_core.weights.digest import tensor_digest

SHARD_BYTES = 4 << 30
_KINDS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}


def write_hf(
    directory: Path, stream: WeightStream, shard_bytes: int = SHARD_BYTES
) -> dict[str, str]:
    """Write all weights of a stream as safetensors files, a bucket in memory at a time.

    A file ends after the bucket with which it passes `shard_bytes`; several files have an index.
    The dtype in config.json (already there) is brought in line. Collective: rank 0 writes and
    answers the digest of each tensor, the others send; only rank 0 uses `directory`.
    """
    if dist.get_rank() != 0:
        for number in range(len(stream.buckets)):
            stream.collect(number, None)
        return {}
    digests: dict[str, str] = {}
    files = _files(stream, shard_bytes)
    into = torch.empty(stream.largest, dtype=torch.uint8)
    for name, numbers in files.items():
        with open(directory / name, "wb") as file:
            file.write(_header([entry for n in numbers for entry in stream.buckets[n]]))
            for number in numbers:
                for tensor_name, tensor in stream.collect(number, into):
                    digests[tensor_name] = tensor_digest(tensor)
                    file.write(memoryview(tensor.flatten().view(torch.uint8).numpy()))
    if len(files) > 1:
        _write_index(directory, stream, files)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = str(stream.buckets[0][0].dtype).removeprefix("torch.")
    path.write_text(json.dumps(config, indent=2) + "\n")
    return digests


def _files(stream: WeightStream, shard_bytes: int) -> dict[str, list[int]]:
    """The numbers of the buckets that go into each file."""
    groups: list[list[int]] = [[]]
    size = 0
    for number, bucket in enumerate(stream.buckets):
        if size >= shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(number)
        size += sum(entry.size for entry in bucket)
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    count = len(groups)
    return {
        f"model-{i:05d}-of-{count:05d}.safetensors": numbers for i, numbers in enumerate(groups, 1)
    }


def _header(entries: list[Entry]) -> bytes:
    """Head of a safetensors file: its length (8 bytes, little endian), then JSON."""
    place = 0
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for entry in entries:
        end = place + entry.size
        table[entry.name] = {
            "dtype": _KINDS[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [place, end],
        }
        place = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_index(directory: Path, stream: WeightStream, files: dict[str, list[int]]) -> None:
    buckets = stream.buckets
    index = {
        "metadata": {"total_size": sum(entry.size for bucket in buckets for entry in bucket)},
        "weight_map": {
            entry.name: name
            for name, numbers in files.items()
            for number in numbers
            for entry in buckets[number]
        },
    }
    path = directory / "model.safetensors.index.json"
    path.write_text(json.dumps(index, indent=2) + "\n")
