"""Rotary positions that are stretched over a longer context than a model was trained on.

| kind | frequency of a pair of dimensions | known from |
|---|---|---|
| `linear` | divided by the factor | position interpolation, arXiv 2306.15595 |
| `llama3` | divided where it turns seldom, unchanged where often, blended between | Llama 3.1 |
| `yarn` | the same with other bounds, and sine and cosine are scaled | YaRN, arXiv 2309.00071 |
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

KINDS = ("linear", "llama3", "yarn")


@dataclass(frozen=True)
class RopeScaling:
    """How frequencies are changed. `low` and `high` bound the blend: turns in the `original`
    context (yarn), or the original context over the wavelength (llama3). `cosine_scale` multiplies
    sine and cosine."""

    kind: str
    factor: float
    original: int = 0
    low: float = 0.0
    high: float = 0.0
    cosine_scale: float = 1.0
    whole_bounds: bool = True

    def frequencies(self, theta: float, dim: int) -> torch.Tensor:
        """Radians per position, float32 [dim / 2], of `dim` rotated dimensions."""
        import torch

        plain = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim)
        if self.kind == "linear":
            return plain / self.factor
        kept = self._kept_llama3(plain) if self.kind == "llama3" else self._kept_yarn(theta, dim)
        return kept * plain + (1 - kept) * plain / self.factor

    def _kept_llama3(self, plain: torch.Tensor) -> torch.Tensor:
        turns = self.original * plain / (2 * math.pi)
        return ((turns - self.low) / (self.high - self.low)).clamp(0, 1)

    def _kept_yarn(self, theta: float, dim: int) -> torch.Tensor:
        import torch

        def place(turns: float) -> float:
            """Of the pair of dimensions that turns so often in the original context."""
            return dim * math.log(self.original / (turns * 2 * math.pi)) / (2 * math.log(theta))

        first, last = place(self.high), place(self.low)
        if self.whole_bounds:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, dim - 1)
        if first == last:
            last += 0.001
        return 1 - ((torch.arange(dim // 2, device="cpu") - first) / (last - first)).clamp(0, 1)


def read_scaling(rope: dict[str, Any], max_positions: int) -> RopeScaling | None:
    """From the object `rope_parameters` (or `rope_scaling`) of a config.json; None: not stretched.

    Raises ValueError naming a field that is missing or unknown.
    """
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind not in KINDS:
        raise ValueError(f"rope_type {kind!r} is not supported, only default, {', '.join(KINDS)}")

    def value(name: str, default: float | None = None) -> float:
        found = rope.get(name)
        found = default if found is None else found
        if isinstance(found, bool) or not isinstance(found, int | float) or found <= 0:
            raise ValueError(
                f"{name} of rope_type {kind!r} must be a positive number, not {found!r}"
            )
        return float(found)

    if kind == "linear":
        return RopeScaling(kind, value("factor"))
    original = int(value("original_max_position_embeddings", max_positions))
    if kind == "llama3":
        low, high = value("low_freq_factor"), value("high_freq_factor")
        if low >= high:
            raise ValueError(f"low_freq_factor {low:g} must be below high_freq_factor {high:g}")
        return RopeScaling(kind, value("factor"), original, low, high)
    # null says that the factor follows from the two lengths
    factor = value("factor", max_positions / original if "factor" in rope else None)
    return RopeScaling(
        kind,
        factor,
        original,
        low=value("beta_slow", 1.0),
        high=value("beta_fast", 32.0),
        cosine_scale=value("attention_factor", _yarn_scale(rope, factor)),
        whole_bounds=rope.get("truncate", True),
    )


def _yarn_scale(rope: dict[str, Any], factor: float) -> float:
    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    mscale, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    return scale(mscale) / scale(all_dim) if mscale and all_dim else scale(1.0)
