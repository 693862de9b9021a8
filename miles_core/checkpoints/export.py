"""torch_dist directories to Hugging Face directories, in safetensors files of a bounded size."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_core.checkpoints import adapters, manifest
from miles_core.checkpoints.layout import HF_DIR, copy_hf_files
from miles_core.checkpoints.stored_adapters import StoredAdapters

if TYPE_CHECKING:
    import torch

    from miles_core.modeling.mapping import Weight

SHARD_BYTES = 4 << 30
DTYPES = ("float32", "bfloat16", "float16")
_SAFETENSORS_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "int64": "I64",
    "int32": "I32",
}


@dataclass
class _Shard:
    """Weights of one file, and name, shape and dtype of each of its tensors."""

    weights: list[Weight] = field(default_factory=list)
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.tensors.values())

    def header(self) -> bytes:
        """The safetensors header: its length (8 bytes, little endian), then JSON."""
        place = 0
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        for name, (shape, dtype) in self.tensors.items():
            end = place + math.prod(shape) * dtype.itemsize
            kind = _SAFETENSORS_NAMES[str(dtype).removeprefix("torch.")]
            entries[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [place, end]}
            place = end
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


def export_to_hf(
    torch_dist_dir: str | Path,
    out_dir: str | Path,
    *,
    shard_bytes: int = SHARD_BYTES,
    dtype: str | None = None,
    base: str | Path | None = None,
) -> list[str]:
    """Write a torch_dist directory (converted or an own checkpoint) as a Hugging Face directory.

    Weight by weight, so that memory for the largest one is enough. Files have at most
    `shard_bytes` of tensors (a larger tensor has a file of its own); with several there is an
    index. `dtype` converts, default is the stored one. Adapters are merged into the converted model
    they belong to; `base` says where that is, if it was moved. Returns the names of the files.
    Raises FileNotFoundError, FileExistsError when `out_dir` exists and is not empty, and
    ValueError for a damaged directory or an unknown dtype.
    """
    source, out = Path(torch_dist_dir), Path(out_dir)
    if not (source / "metadata.json").is_file():
        raise FileNotFoundError(f"{source} is not a torch_dist directory")
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    if base is not None and adapters.read(source) is None:
        raise ValueError(f"{source} holds no adapters but a whole model; leave --base out")
    problem = manifest.verify_if_sealed(source)
    if problem is not None:
        raise ValueError(f"{source}: {problem}")
    with manifest.new_directory(out) as directory:
        copy_hf_files(source / HF_DIR, directory)
        return _Export(source, dtype, base).write(directory, shard_bytes)


def _converted_base(source: Path, given: str | Path | None) -> Path:
    """The converted model under the adapters of a checkpoint."""
    base = adapters.find_base(source, given)
    if not (base / "metadata.json").is_file():
        raise ValueError(f"{base} is not a converted model; convert it, and say where that is")
    problem = manifest.verify(base)
    if problem is not None:
        raise ValueError(f"{base}: {problem}")
    return base


class _Export:
    def __init__(self, source: Path, dtype: str | None, base: str | Path | None) -> None:
        import torch

        from miles_core.modeling.families import weights
        from miles_core.modeling.hf_config import read_spec
        from miles_core.modeling.shard_map import shard_map
        from miles_core.modeling.shard_reader import ShardReader

        spec = read_spec(source / HF_DIR)
        self._weights = list(weights(spec))
        self._map = shard_map(spec)
        about = adapters.read(source)
        self._adapters = None if about is None else StoredAdapters(source, about)
        self._reader = ShardReader(source if about is None else _converted_base(source, base))
        self._dtype: torch.dtype | None = None if dtype is None else getattr(torch, dtype)

    def write(self, directory: Path, shard_bytes: int) -> list[str]:
        shards = self._plan(shard_bytes)
        count = len(shards)
        names = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
        if count == 1:
            names = ["model.safetensors"]
        for name, shard in zip(names, shards, strict=True):
            with _named_faults(directory / name), open(directory / name, "wb") as file:
                file.write(shard.header())
                for data in self._values(shard):
                    file.write(data)
        if count > 1:
            index = {
                "metadata": {"total_size": sum(shard.size for shard in shards)},
                "weight_map": {
                    tensor: name
                    for name, shard in zip(names, shards, strict=True)
                    for tensor in shard.tensors
                },
            }
            path = directory / "model.safetensors.index.json"
            path.write_text(json.dumps(index, indent=2) + "\n")
        _set_dtype(directory / "config.json", shards[0])
        return names

    def _plan(self, shard_bytes: int) -> list[_Shard]:
        """Which weights go into which file; no value is read for that."""
        import torch

        shards = [_Shard()]
        for weight in self._weights:
            stored = self._reader.dtype(self._map.pieces[weight.ours][0].key)
            dtype = self._dtype or stored
            empty = torch.empty(self._map.shapes[weight.ours], dtype=dtype, device="meta")
            parts = weight.cut.whole([empty])
            new = {n: (tuple(p.shape), dtype) for n, p in zip(weight.theirs, parts, strict=True)}
            size = empty.numel() * dtype.itemsize
            if shards[-1].weights and shards[-1].size + size > shard_bytes:
                shards.append(_Shard())
            shards[-1].weights.append(weight)
            shards[-1].tensors.update(new)
        return shards

    def _values(self, shard: _Shard) -> Iterator[memoryview]:
        """The bytes of the tensors of a file, in their order."""
        import torch

        for weight in shard.weights:
            name = weight.ours
            value = self._reader.parameter(self._map.pieces[name], self._map.shapes[name])
            for theirs, part in zip(weight.theirs, weight.cut.whole([value]), strict=True):
                if self._adapters is not None:
                    part = self._adapters.merged(theirs, part)
                if self._dtype is not None:
                    part = part.to(self._dtype)
                yield memoryview(part.contiguous().flatten().view(torch.uint8).numpy())


@contextmanager
def _named_faults(path: Path) -> Iterator[None]:
    """A write that fails, as on a full disk, does not tell its file by itself."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def _set_dtype(path: Path, shard: _Shard) -> None:
    """Bring the dtype in config.json in line with the tensors."""
    _, dtype = next(iter(shard.tensors.values()))
    config = json.loads(path.read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    path.write_text(json.dumps(config, indent=2) + "\n")
