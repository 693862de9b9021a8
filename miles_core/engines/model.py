"""The forward pass of a decoder (Qwen3, Qwen3 MoE, Llama) over a packed batch of ragged segments.

Tokens of all sequences of a step stand in one [tokens, hidden] matrix, whether they are prompt
tokens or the one new token of a decoded sequence, so that every linear layer runs once a step.
Attention runs segment by segment against the sequence's own extent of the cache, hence nothing is
padded and no mask is needed for decoding. Decoded sequences of one length whose extents lie side
by side, as those of a group with one prompt often do, are one call (`Run`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from miles_core.engines.experts import mix_experts
from miles_core.engines.kv import Extent, KVPool
from miles_core.engines.shape import ModelShape
from miles_core.engines.weights import Layer, Weights


@dataclass(frozen=True)
class Segment:
    """`count` new tokens of a sequence, the first of them at position `start`."""

    extent: Extent
    start: int
    count: int


@dataclass(frozen=True)
class Run:
    """What `count` decoded sequences attend to: [count, kv_heads, length, head_dim] by layer."""

    count: int
    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]


class Decoder:
    """A model and its cache; `loaded` may be replaced between two steps, and is None at first."""

    def __init__(self, shape: ModelShape, dtype: torch.dtype, pool: KVPool, context: int) -> None:
        self.shape = shape
        self.loaded: Weights | None = None
        self.pool = pool
        self.q_size = shape.heads * shape.head_dim
        # Rotary angles as in Su et al., 2021 (arXiv:2104.09864), halves paired (i, i + d/2).
        exponent = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
        angles = torch.outer(
            torch.arange(context, dtype=torch.float32), 1.0 / shape.rope_theta**exponent
        )
        self.cos = torch.cat([angles.cos(), angles.cos()], -1).to(dtype)
        self.sin = torch.cat([-angles.sin(), angles.sin()], -1).to(dtype)
        sizes = (shape.hidden, shape.head_dim)
        self.floor = {n: torch.tensor(math.sqrt(n * shape.eps)) for n in sizes}

    @property
    def weights(self) -> Weights:
        """What is served; nothing may be computed before there is something."""
        assert self.loaded is not None, "the engine holds no weights"
        return self.loaded

    def forward(
        self, tokens: torch.Tensor, segments: list[Segment], last_only: bool = False
    ) -> torch.Tensor:
        """Final hidden states [tokens, hidden] of the packed new tokens of `segments`.

        Keys and values of the new tokens are written to the cache. Segments of one token must
        come before longer ones. With `last_only` the answer is [segments, hidden]: the last token
        of each, and the last layer computes no more than keys and values for the others, unless
        it has to tell to which experts they go.
        """
        positions, places = _positions(segments)
        cos, sin = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)
        singles = sum(segment.count == 1 for segment in segments)
        longer = segments[singles:]
        x = F.embedding(tokens, self.weights.embedding)
        masks = [self._mask(segment) for segment in longer]
        runs = self._runs(segments[:singles])
        last = self.shape.layers - 1
        for index, layer in enumerate(self.weights.layers):
            q = self._project(index, layer, x, cos, sin, places)
            if last_only and index == last and longer and self.pool.experts is None:
                ends = _ends(segments)
                x, q = x[ends], q[ends]
                runs = self._runs([Segment(s.extent, s.start + s.count - 1, 1) for s in segments])
                singles, longer, masks = len(segments), [], []
            attended = self._attend_singles(index, q[:singles], runs)
            attended += self._attend_longer(index, q[singles:], longer, masks)
            x = self._mix(index, layer, x, attended, places)
        if last_only and longer:
            x = x[_ends(segments)]
        return self._norm(x, self.weights.norm)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [rows, vocab] in float32."""
        return (hidden @ self.weights.head).float()

    @staticmethod
    def _mask(segment: Segment) -> torch.Tensor | None:
        """[count, end], true where a new token may look; None when it is plain causal."""
        if segment.start == 0:
            return None
        end = segment.start + segment.count
        return torch.ones(segment.count, end, dtype=torch.bool).tril_(segment.start)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Root-mean-square norm of the n values of the last axis, computed in float32.

        With a weight that holds sqrt(n) as a factor, x / sqrt(mean(x^2) + eps) * w is
        x / hypot(|x|, sqrt(n * eps)) * weight, which takes fewer passes than F.rms_norm on a CPU.
        """
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        return (x / torch.hypot(length, self.floor[x.shape[-1]])).mul_(weight).to(x.dtype)

    def _rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotary embedding; the sign of the swapped halves is in `sin`."""
        return (x * cos).addcmul_(x.roll(self.shape.head_dim // 2, -1), sin)

    def _project(
        self,
        index: int,
        layer: Layer,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        places: torch.Tensor,
    ) -> torch.Tensor:
        """Queries [tokens, heads, head_dim]; keys and values go to their places in the cache."""
        shape = self.shape
        qkv = self._norm(x, layer.input_norm) @ layer.qkv
        qkv = qkv.view(-1, shape.heads + 2 * shape.kv_heads, shape.head_dim)
        qk, v = qkv.split([shape.heads + shape.kv_heads, shape.kv_heads], 1)
        if layer.qk_norm is not None:
            qk = self._norm(qk, layer.qk_norm)
        q, k = self._rotate(qk, cos, sin).split([shape.heads, shape.kv_heads], 1)
        self.pool.layer_keys[index].index_copy_(1, places, k.transpose(0, 1))
        self.pool.layer_values[index].index_copy_(1, places, v.transpose(0, 1))
        return q

    def _mix(
        self,
        index: int,
        layer: Layer,
        x: torch.Tensor,
        attended: list[torch.Tensor],
        places: torch.Tensor,
    ) -> torch.Tensor:
        """The rest of a layer; answers the new x, and notes the experts that tokens went to."""
        mixed = torch.cat(attended) if len(attended) > 1 else attended[0]
        x = torch.addmm(x, mixed, layer.out)
        normed = self._norm(x, layer.post_norm)
        if layer.gate_up is None:
            assert self.shape.experts is not None and self.pool.experts is not None
            out, chosen = mix_experts(normed, layer, self.shape.experts)
            self.pool.experts[places, index] = chosen.int()
            return x + out
        assert layer.down is not None
        gate, up = (normed @ layer.gate_up).chunk(2, -1)
        return torch.addmm(x, F.silu(gate).mul_(up), layer.down)

    def _runs(self, segments: list[Segment]) -> list[Run]:
        """Cached keys and values of decoded tokens, consecutive like sequences in one run."""
        runs = []
        first = 0
        for index, segment in enumerate(segments):
            if index + 1 < len(segments) and _alike(segment, segments[index + 1]):
                continue
            count, size, length = index + 1 - first, segment.extent.size, segment.start + 1
            start, first = segments[first].extent.start, index + 1
            keys, values = (
                pool.narrow(2, start, count * size)
                .unflatten(2, (count, size))
                .transpose(1, 2)
                .narrow(3, 0, length)
                .unbind(0)
                for pool in (self.pool.keys, self.pool.values)
            )
            runs.append(Run(count, keys, values))
        return runs

    def _attend_singles(self, index: int, q: torch.Tensor, runs: list[Run]) -> list[torch.Tensor]:
        """Attention of decoded tokens; q is [rows, heads, head_dim].

        The query heads that share a key head become query rows, so no key is repeated.
        """
        if not runs:
            return []
        grouped = q.reshape(-1, self.shape.kv_heads, q.shape[1] // self.shape.kv_heads, q.shape[2])
        rows = grouped.split([run.count for run in runs])
        out = [
            F.scaled_dot_product_attention(row, run.keys[index], run.values[index])
            for row, run in zip(rows, runs, strict=True)
        ]
        return [torch.cat(out).view(-1, self.q_size)]

    def _attend_longer(
        self,
        index: int,
        q: torch.Tensor,
        segments: list[Segment],
        masks: list[torch.Tensor | None],
    ) -> list[torch.Tensor]:
        """Attention of prompt segments, [count, heads * head_dim] each."""
        if not segments:
            return []
        out = []
        keys = self.pool.layer_keys[index].unsqueeze(0)
        values = self.pool.layer_values[index].unsqueeze(0)
        rows = q.split([segment.count for segment in segments])
        for row, segment, mask in zip(rows, segments, masks, strict=True):
            start, length = segment.extent.start, segment.start + segment.count
            attended = F.scaled_dot_product_attention(
                row.transpose(0, 1).unsqueeze(0),
                keys.narrow(2, start, length),
                values.narrow(2, start, length),
                attn_mask=mask,
                is_causal=mask is None,
                enable_gqa=True,
            )
            out.append(attended[0].transpose(0, 1).reshape(segment.count, self.q_size))
        return out


def _ends(segments: list[Segment]) -> torch.Tensor:
    """The row of each segment's last token."""
    return torch.tensor([segment.count for segment in segments]).cumsum(0) - 1


def _alike(segment: Segment, following: Segment) -> bool:
    """Whether two sequences are equally long and their extents equally large and side by side."""
    a, b = segment.extent, following.extent
    return segment.start == following.start and a.size == b.size and a.start + a.size == b.start


def _positions(segments: list[Segment]) -> tuple[torch.Tensor, torch.Tensor]:
    """Position in its sequence, and place in the pool, of every new token."""
    positions: list[int] = []
    places: list[int] = []
    for segment in segments:
        end = segment.start + segment.count
        positions.extend(range(segment.start, end))
        places.extend(range(segment.extent.start + segment.start, segment.extent.start + end))
    return torch.tensor(positions), torch.tensor(places)
