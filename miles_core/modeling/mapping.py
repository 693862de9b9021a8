"""How Hugging Face tensors become megatron parameters, and how tensor parallelism cuts them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from miles_core.modeling.hf_config import ModelSpec

if TYPE_CHECKING:
    import torch

Tensors: TypeAlias = "Sequence[torch.Tensor]"


class Cut(Protocol):
    """Between the Hugging Face tensors of one parameter and its shards."""

    def shard(self, parts: Tensors, rank: int, size: int) -> torch.Tensor:
        """The parameter of tensor-parallel rank `rank` of `size`."""

    def whole(self, shards: Tensors) -> list[torch.Tensor]:
        """The Hugging Face tensors, from the shards of all ranks in order."""


def _join(tensors: Tensors, dim: int = 0) -> torch.Tensor:
    """The tensors behind each other; a single one is not copied."""
    import torch  # not at the top: names of weights are wanted without it

    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim)


class Whole:
    """One tensor, the same on every rank."""

    def shard(self, parts: Tensors, rank: int, size: int) -> torch.Tensor:
        return parts[0]

    def whole(self, shards: Tensors) -> list[torch.Tensor]:
        return [shards[0]]


@dataclass(frozen=True)
class Along:
    """One tensor, cut along a dimension."""

    dim: int

    def shard(self, parts: Tensors, rank: int, size: int) -> torch.Tensor:
        return parts[0].chunk(size, self.dim)[rank]

    def whole(self, shards: Tensors) -> list[torch.Tensor]:
        return [_join(shards, self.dim)]


class GateUp:
    """Gate and up projection, one above the other within each shard."""

    def shard(self, parts: Tensors, rank: int, size: int) -> torch.Tensor:
        return _join([part.chunk(size)[rank] for part in parts])

    def whole(self, shards: Tensors) -> list[torch.Tensor]:
        halves = [shard.chunk(2) for shard in shards]
        return [_join([half[i] for half in halves]) for i in range(2)]


@dataclass(frozen=True)
class Qkv:
    """Query, key and value projection (weight or bias), interleaved by key-value head."""

    spec: ModelSpec

    def shard(self, parts: Tensors, rank: int, size: int) -> torch.Tensor:
        q, k, v = parts
        return _join_qkv(q, k, v, self.spec).chunk(size)[rank]

    def whole(self, shards: Tensors) -> list[torch.Tensor]:
        return _split_qkv(_join(shards), self.spec)


def _join_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: ModelSpec) -> torch.Tensor:
    """megatron's rows: for each key-value head its query heads, then its key, then its value."""
    parts = [x.reshape(spec.num_kv_heads, -1, *x.shape[1:]) for x in (q, k, v)]
    return _join(parts, dim=1).flatten(0, 1)


def _split_qkv(qkv: torch.Tensor, spec: ModelSpec) -> list[torch.Tensor]:
    """Inverse of `_join_qkv`."""
    groups, size = spec.num_kv_heads, spec.head_dim
    queries = spec.num_heads // groups * size
    parts = qkv.reshape(groups, -1, *qkv.shape[1:]).split([queries, size, size], dim=1)
    return [x.flatten(0, 1) for x in parts]


@dataclass(frozen=True)
class Weight:
    """One megatron tensor, under its name in the whole model (layers and experts counted from 0
    over all ranks), and the Hugging Face tensors it is made of. `expert`: of a routed expert."""

    ours: str
    theirs: tuple[str, ...]
    cut: Cut
    expert: bool = False


def norms(layer: int) -> Iterator[Weight]:
    """The two norms of a layer."""
    ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
    for own, name in (
        ("input_layernorm", "input_layernorm"),
        ("pre_mlp_layernorm", "post_attention_layernorm"),
    ):
        yield Weight(f"{ours}{own}.weight", (f"{theirs}{name}.weight",), Whole())


def grouped_attention(spec: ModelSpec, layer: int) -> Iterator[Weight]:
    """Grouped-query attention, with the biases and query and key norms that the model has."""
    ours, theirs = f"decoder.layers.{layer}.self_attention.", f"model.layers.{layer}.self_attn."
    for kind in ("weight", "bias") if spec.qkv_bias else ("weight",):
        sources = tuple(f"{theirs}{x}_proj.{kind}" for x in "qkv")
        yield Weight(f"{ours}linear_qkv.{kind}", sources, Qkv(spec))
    yield Weight(f"{ours}linear_proj.weight", (f"{theirs}o_proj.weight",), Along(1))
    if spec.qk_norm:
        for x in "qk":
            yield Weight(f"{ours}{x}_layernorm.weight", (f"{theirs}{x}_norm.weight",), Whole())


def gated_mlp(ours: str, theirs: str, expert: bool = False) -> Iterator[Weight]:
    """A SwiGLU block between two prefixes."""
    gate_up = (f"{theirs}gate_proj.weight", f"{theirs}up_proj.weight")
    yield Weight(f"{ours}linear_fc1.weight", gate_up, GateUp(), expert)
    yield Weight(f"{ours}linear_fc2.weight", (f"{theirs}down_proj.weight",), Along(1), expert)


def dense_or_sparse_mlp(spec: ModelSpec, layer: int) -> Iterator[Weight]:
    """The MLP of a layer: dense, or router, experts and shared expert."""
    ours, theirs = f"decoder.layers.{layer}.mlp.", f"model.layers.{layer}.mlp."
    if spec.moe is None or not spec.sparse(layer):
        yield from gated_mlp(ours, theirs)
        return
    yield Weight(f"{ours}router.weight", (f"{theirs}gate.weight",), Whole())
    if spec.moe.bias:
        source = f"{theirs}gate.e_score_correction_bias"
        yield Weight(f"{ours}router.expert_bias", (source,), Whole())
    if spec.moe.shared_ffn_size:
        yield from gated_mlp(f"{ours}shared_experts.", f"{theirs}shared_experts.")
    for i in range(spec.moe.num_experts):
        yield from gated_mlp(
            f"{ours}experts.local_experts.{i}.", f"{theirs}experts.{i}.", expert=True
        )


def grouped_layer(spec: ModelSpec, layer: int) -> Iterator[Weight]:
    """A layer with grouped-query attention."""
    yield from norms(layer)
    yield from grouped_attention(spec, layer)
    yield from dense_or_sparse_mlp(spec, layer)
