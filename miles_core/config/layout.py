"""Which layouts of trainer ranks are possible for a model, and the nearest one to a wish.

Knows neither torch nor megatron, so that a wrong layout is refused before anything starts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Protocol

_FLAGS = {
    "tensor": "tensor_model_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "context": "context_parallel_size",
    "expert": "expert_model_parallel_size",
    "sequence": "sequence_parallel",
}


class LayoutFields(Protocol):
    """The fields of a training configuration that say how the work is cut."""

    @property
    def packing(self) -> bool: ...
    @property
    def tensor_model_parallel_size(self) -> int: ...
    @property
    def pipeline_model_parallel_size(self) -> int: ...
    @property
    def context_parallel_size(self) -> int: ...
    @property
    def expert_model_parallel_size(self) -> int: ...
    @property
    def sequence_parallel(self) -> bool: ...


@dataclass(frozen=True)
class Sizes:
    """Parallel sizes; `sequence`: activations are split between tensor-parallel ranks too."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    sequence: bool = False

    @classmethod
    def of(cls, training: LayoutFields) -> Sizes:
        return cls(**{name: getattr(training, flag) for name, flag in _FLAGS.items()})

    def distance(self, other: Sizes) -> float:
        """How many halvings and doublings apart; sequence parallelism counts least."""
        pairs = ((getattr(self, f.name), getattr(other, f.name)) for f in fields(self)[:4])
        return sum(abs(math.log2(a / b)) for a, b in pairs) + 0.1 * (
            self.sequence != other.sequence
        )

    def flags(self, wished: Sizes) -> str:
        """The command-line flags in which this differs from `wished`."""
        parts = []
        for name, field in _FLAGS.items():
            value, flag = getattr(self, name), field.replace("_", "-")
            if value != getattr(wished, name):
                plain = f"--{flag} {value}"
                parts.append(plain if name != "sequence" else f"--{'' if value else 'no-'}{flag}")
        return " ".join(parts)


@dataclass(frozen=True)
class ModelShape:
    """What of a model has to be divisible: `cut` over tensor-parallel ranks, `expert_cut` too
    unless experts are spread, `layers` over pipeline stages, `experts` over expert ranks."""

    cut: tuple[tuple[str, int], ...]
    expert_cut: tuple[tuple[str, int], ...]
    layers: int
    experts: int


def read_model_shape(hf_dir: str | Path) -> ModelShape:
    """The shape that the config.json of a Hugging Face directory describes."""
    config = json.loads((Path(hf_dir) / "config.json").read_text())
    names = {
        "vocab_size": "tokens of the vocabulary",
        "num_attention_heads": "attention heads",
        "num_key_value_heads": "key-value heads",
        "intermediate_size": "intermediate_size",
        "q_lora_rank": "q_lora_rank",
    }
    cut = [(text, config[name]) for name, text in names.items() if config.get(name)]
    if config.get("kv_lora_rank"):
        width = config["kv_lora_rank"] + config["qk_rope_head_dim"]
        cut.append(("kv_lora_rank and qk_rope_head_dim together", width))
    experts = _experts(config)
    width = config.get("moe_intermediate_size")
    if experts and config.get("n_shared_experts"):
        cut.append(("width of the shared expert", width * config["n_shared_experts"]))
    expert_cut = (("moe_intermediate_size", width),) if experts else ()
    return ModelShape(tuple(cut), expert_cut, config["num_hidden_layers"], experts)


def _experts(config: dict[str, Any]) -> int:
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    return next((config[name] for name in names if config.get(name)), 0)


def layout_faults(ranks: int, sizes: Sizes, model: ModelShape | None = None) -> Iterator[str]:
    """Every reason why the layout is impossible; without a model those that hold for any."""
    product_of = sizes.tensor * sizes.pipeline * sizes.context
    if ranks % product_of:
        yield (
            f"{ranks} ranks are not a multiple of tensor {sizes.tensor} x pipeline "
            f"{sizes.pipeline} x context {sizes.context}"
        )
    if ranks % (sizes.expert * sizes.pipeline):
        yield (
            f"{ranks} ranks are not a multiple of expert {sizes.expert} x pipeline {sizes.pipeline}"
        )
    if sizes.sequence and sizes.tensor == 1:
        yield "sequence parallelism splits between tensor parallel ranks, and there is one"
    if model is None:
        return
    for text, size in (*model.cut, *(model.expert_cut if sizes.expert == 1 else ())):
        if size % sizes.tensor:
            yield f"{size} {text} are not a multiple of tensor {sizes.tensor}"
    if model.layers % sizes.pipeline:
        yield f"{model.layers} layers are not a multiple of pipeline {sizes.pipeline}"
    if model.experts and sizes.tensor > 1 and not sizes.sequence:
        yield "experts with tensor parallelism need sequence parallelism"
    if sizes.expert > 1 and (not model.experts or model.experts % sizes.expert):
        yield f"{model.experts} experts are not a multiple of expert {sizes.expert}"


@cache
def _divisors(number: int) -> tuple[int, ...]:
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return tuple(sorted({*low, *(number // n for n in low)}))


def nearest_layout(ranks: int, wished: Sizes, model: ModelShape | None = None) -> Sizes:
    """The possible layout of as many ranks that is the fewest halvings and doublings away."""
    experts = model is None or model.experts > 0
    candidates = (
        Sizes(tensor, pipeline, context, expert, sequence)
        for tensor in _divisors(ranks)
        for pipeline in _divisors(ranks // tensor)
        for context in _divisors(ranks // (tensor * pipeline))
        for expert in (_divisors(ranks // pipeline) if experts else (1,))
        for sequence in ((False, True) if tensor > 1 else (False,))
    )
    possible = (c for c in candidates if not any(layout_faults(ranks, c, model)))
    return min(possible, key=lambda c: (c.distance(wished), c.pipeline, c.context, c.expert))


def layout_error(ranks: int, training: LayoutFields, model: ModelShape | None = None) -> str | None:
    """Why the layout is impossible and which one of as many ranks comes nearest, or None."""
    wished = Sizes.of(training)
    faults = list(layout_faults(ranks, wished, model))
    if not faults:
        return None
    flags = nearest_layout(ranks, wished, model).flags(wished)
    return f"{'; '.join(faults)}. The nearest possible layout of {ranks} ranks: {flags}"


def padding(training: LayoutFields) -> tuple[int, int]:
    """(unit, slack) in tokens: a sample is padded to a multiple of `unit`, and a packed micro-batch
    by up to `slack` more, so that it can be cut."""
    chunks = 2 * training.context_parallel_size if training.context_parallel_size > 1 else 1
    tensor = training.tensor_model_parallel_size if training.sequence_parallel else 1
    if not training.packing:
        return chunks * tensor, 0
    return chunks, chunks * (tensor - 1)


def tokens_needed(training: LayoutFields, length: int) -> int:
    """The smallest `max_tokens_per_gpu` that holds a sample of `length` tokens."""
    unit, slack = padding(training)
    whole = -(-length // unit) * unit + slack
    return -(-whole // training.context_parallel_size)
