"""Digests of tensors that cost less than a copy, to compare two sides of a transfer.

They find damage, a wrong place and a wrong tensor; they are no defence against an adversary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

_COLUMNS = 1024
_WORD = 8


def tensor_digest(tensor: torch.Tensor) -> str:
    """Digest of type, shape and bytes, 32 hexadecimal digits.

    The bytes are taken as rows of 1024 words of 64 bits, of which the sums of each row and of each
    column (modulo 2**64) are hashed, with what does not fill a row; so every word counts at its
    place.
    """
    state = hashlib.blake2b(digest_size=16)
    state.update(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
    flat = tensor.detach().contiguous().flatten()
    if flat.storage_offset() * flat.element_size() % _WORD:
        flat = flat.clone()
    data = flat.view(torch.uint8)
    whole = data.numel() // (_COLUMNS * _WORD) * (_COLUMNS * _WORD)
    if whole:
        words = data[:whole].view(torch.int64).view(-1, _COLUMNS)
        state.update(words.sum(0).cpu().numpy())
        state.update(words.sum(1).cpu().numpy())
    state.update(data[whole:].cpu().numpy())
    return state.hexdigest()


def state_digest(digests: Mapping[str, str]) -> str:
    """One digest of named tensors, whatever their order."""
    lines = "".join(f"{name} {digest}\n" for name, digest in sorted(digests.items()))
    return hashlib.blake2b(lines.encode(), digest_size=16).hexdigest()
