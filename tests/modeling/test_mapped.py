"""Tensors that torch.save wrote somewhere inside a file are mapped, however it was set up."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch

from miles_core.modeling.mapped import Window, map_tensor

BEFORE = 4096 + 64


def _stored(path: Path, value: torch.Tensor, checksums: bool) -> int:
    """Write the value behind other bytes; the length of its archive."""
    archive = io.BytesIO()
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(checksums)
    try:
        torch.save(value, archive)
    finally:
        torch.serialization.set_crc32_options(before)
    path.write_bytes(bytes(BEFORE) + archive.getvalue() + b"more")
    return len(archive.getvalue())


@pytest.mark.parametrize("checksums", [True, False])
@pytest.mark.parametrize("shape", [(1,), (7, 3), (300, 500)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_a_stored_tensor_is_mapped(
    tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...], checksums: bool
) -> None:
    value = (torch.rand(shape) * 1000).to(dtype)
    path = tmp_path / "file"
    length = _stored(path, value, checksums)
    with open(path, "rb") as file:
        view = io.BufferedReader(Window(file, BEFORE, length))
        mapped = map_tensor(path, view, BEFORE, dtype, shape)
    assert mapped is not None and torch.equal(mapped, value)


@pytest.mark.parametrize("checksums", [True, False])
def test_what_is_stored_in_another_way_is_not_mapped(tmp_path: Path, checksums: bool) -> None:
    path = tmp_path / "file"
    length = _stored(path, torch.rand(6, 4).t(), checksums)
    with open(path, "rb") as file:
        view = io.BufferedReader(Window(file, BEFORE, length))
        assert map_tensor(path, view, BEFORE, torch.float32, (4, 6)) is None
