"""The model families: each reads its config.json and lists the weights of a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from miles_core.modeling.families import glm4_moe, glm4_moe_lite, llama, qwen3, qwen3_moe
from miles_core.modeling.hf_config import ModelSpec
from miles_core.modeling.mapping import Along, Weight, Whole, grouped_layer


@dataclass(frozen=True)
class Family:
    """`read` turns a config.json into a ModelSpec, `layer` names the weights of a layer."""

    read: Callable[[dict[str, Any]], ModelSpec]
    layer: Callable[[ModelSpec, int], Iterator[Weight]]


EMBEDDING = "embedding.word_embeddings.weight"
FAMILIES = {
    "qwen3": Family(qwen3.read, grouped_layer),
    "qwen3_moe": Family(qwen3_moe.read, grouped_layer),
    "llama": Family(llama.read, grouped_layer),
    "glm4_moe": Family(glm4_moe.read, grouped_layer),
    "glm4_moe_lite": Family(glm4_moe_lite.read, glm4_moe_lite.layer),
}


def weights(spec: ModelSpec) -> Iterator[Weight]:
    """All weights of the model; a tied output layer is not one of its own."""
    yield Weight(EMBEDDING, ("model.embed_tokens.weight",), Along(0))
    for layer in range(spec.num_layers):
        yield from FAMILIES[spec.model_type].layer(spec, layer)
    yield Weight("decoder.final_layernorm.weight", ("model.norm.weight",), Whole())
    if not spec.tied:
        yield Weight("output_layer.weight", ("lm_head.weight",), Along(0))
