"""Floating-point operations of a model's passes, counted from its shape.

A multiply-add is two operations. What is counted is matrix multiplication alone, as in the count of
model FLOPs of PaLM (arXiv 2204.02311, appendix B) and of Megatron-LM (arXiv 2104.04473, appendix),
with two refinements: causal attention is counted half, since half of its scores are never needed,
and of routed experts those count that a token is sent to. Recomputed activations do not count, so
that tokens per second and model FLOPs use say the same of two runs.
"""

from __future__ import annotations

from miles_core.modeling.hf_config import MlaSpec, ModelSpec, MoeSpec

BACKWARD = 2.0
"""Operations of a backward pass in those of the forward pass: one product for the gradient of the
input and one for that of the weight."""


def _latent_projections(spec: ModelSpec, mla: MlaSpec) -> int:
    queries = spec.num_heads * (mla.plain_dim + mla.rope_dim)
    if mla.q_rank is None:
        down_and_up = spec.hidden_size * queries
    else:
        down_and_up = mla.q_rank * (spec.hidden_size + queries)
    latent = spec.hidden_size * (mla.kv_rank + mla.rope_dim)
    keys_values = mla.kv_rank * spec.num_heads * (mla.plain_dim + mla.value_dim)
    return down_and_up + latent + keys_values + spec.num_heads * mla.value_dim * spec.hidden_size


def _projections(spec: ModelSpec) -> int:
    """Multiply-adds of a token in the projections of one attention layer."""
    if spec.mla is not None:
        return _latent_projections(spec, spec.mla)
    return 2 * spec.hidden_size * spec.head_dim * (spec.num_heads + spec.num_kv_heads)


def _experts(spec: ModelSpec, moe: MoeSpec) -> int:
    widths = moe.top_k * moe.ffn_size + moe.shared_ffn_size
    return spec.hidden_size * (moe.num_experts + 3 * widths)


def _feed_forward(spec: ModelSpec, layer: int) -> int:
    """Multiply-adds of a token in a layer's SwiGLU, or in its router and active experts."""
    if spec.moe is not None and spec.sparse(layer):
        return _experts(spec, spec.moe)
    return 3 * spec.hidden_size * spec.ffn_size


def _score_width(spec: ModelSpec) -> int:
    """Multiply-adds of a query with one key and its value, over all heads of a layer."""
    if spec.mla is not None:
        return spec.num_heads * (spec.mla.plain_dim + spec.mla.rope_dim + spec.mla.value_dim)
    return 2 * spec.num_heads * spec.head_dim


def forward_flops(spec: ModelSpec, length: int, logits: int | None = None) -> float:
    """Operations of a forward pass over one sequence of `length` tokens, on all ranks together.

    `logits`: the tokens whose logits are computed (default: all). With l layers, projections and
    feed-forward of A_l and F_l multiply-adds for a token, a score width W, hidden size h and
    vocabulary V: 2 (length sum_l (A_l + F_l) + l W length^2 / 2 + logits h V).
    """
    linear = sum(_projections(spec) + _feed_forward(spec, n) for n in range(spec.num_layers))
    scores = spec.num_layers * _score_width(spec) * length * length / 2
    head = spec.hidden_size * spec.vocab_size * (length if logits is None else logits)
    return 2.0 * (length * linear + scores + head)


def training_flops(spec: ModelSpec, length: int, logits: int | None = None) -> float:
    """Operations of a forward and a backward pass over one sequence."""
    return (1.0 + BACKWARD) * forward_flops(spec, length, logits)
