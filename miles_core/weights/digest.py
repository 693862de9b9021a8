"""Digests of tensors that cost less than a copy, to compare two sides of a transfer.

They find damage, a wrong place and a wrong tensor; they are no defence against an adversary.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import xxhash


def tensor_digest(tensor: torch.Tensor) -> str:
    """Digest (XXH3 of 128 bits, hex) of type, shape and bytes of a tensor on any device."""
    state = xxhash.xxh3_128(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    state.update(memoryview(data.numpy()))
    return state.hexdigest()


def state_digest(digests: Mapping[str, str]) -> str:
    """One digest of named tensors, whatever their order."""
    lines = "".join(f"{name} {digest}\n" for name, digest in sorted(digests.items()))
    return xxhash.xxh3_128_hexdigest(lines.encode())
