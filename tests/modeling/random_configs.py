"""Random small configurations of every family, over the fields that decide what is computed."""

from __future__ import annotations

import random
from typing import Any

STRETCHED: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 3.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24},
    {
        "rope_type": "yarn",
        "factor": 2.5,
        "beta_fast": 8.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.2,
        "truncate": False,
        "original_max_position_embeddings": 40,
    },
]


def _base(rng: random.Random) -> dict[str, Any]:
    return {
        "vocab_size": rng.choice([31, 64, 97]),
        "hidden_size": rng.choice([24, 40, 66]),
        "intermediate_size": rng.choice([17, 48]),
        "num_hidden_layers": rng.choice([1, 2, 3]),
        "max_position_embeddings": 128,
        "rms_norm_eps": rng.choice([1e-6, 1e-5, 1e-3]),
        "tie_word_embeddings": rng.random() < 0.5,
    }


def _rope(rng: random.Random, stretched: bool) -> dict[str, Any]:
    rope = {"rope_theta": rng.choice([100.0, 10000.0, 1e6])}
    if stretched and rng.random() < 0.6:
        return rope | rng.choice(STRETCHED)
    return rope | {"rope_type": "default"}


def _grouped(rng: random.Random) -> dict[str, Any]:
    groups = rng.choice([1, 2, 3])
    return {
        "num_key_value_heads": groups,
        "num_attention_heads": groups * rng.choice([1, 2, 3]),
        "head_dim": rng.choice([6, 8, 14]),
    }


def _glm_experts(rng: random.Random) -> dict[str, Any]:
    experts = rng.choice([3, 4, 7])
    return {
        "n_routed_experts": experts,
        "num_experts_per_tok": rng.choice([2, 3, experts]),
        "moe_intermediate_size": rng.choice([9, 16]),
        "n_shared_experts": rng.choice([0, 1, 2]),
        "routed_scaling_factor": rng.choice([1.0, 0.5, 2.5]),
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
    }


def qwen3(rng: random.Random) -> dict[str, Any]:
    return _base(rng) | _grouped(rng) | {"rope_parameters": _rope(rng, True)}


def llama(rng: random.Random) -> dict[str, Any]:
    values = qwen3(rng)  # transformers wants whole heads here
    return values | {"hidden_size": values["num_attention_heads"] * rng.choice([5, 8])}


def qwen3_moe(rng: random.Random) -> dict[str, Any]:
    experts = rng.choice([3, 4, 7])
    top_k = rng.choice([1, 2, experts])
    return (
        _base(rng)
        | _grouped(rng)
        | {
            "rope_parameters": _rope(rng, True),
            "num_experts": experts,
            "num_experts_per_tok": top_k,
            "moe_intermediate_size": rng.choice([9, 16]),
            "norm_topk_prob": top_k > 1 and rng.random() < 0.5,
            "decoder_sparse_step": rng.choice([1, 1, 2]),
            "mlp_only_layers": rng.choice([[], [0]]),
        }
    )


def glm4_moe(rng: random.Random) -> dict[str, Any]:
    rope = _rope(rng, False) | {"partial_rotary_factor": rng.choice([0.5, 1.0, 0.34])}
    return (
        _base(rng)
        | _grouped(rng)
        | _glm_experts(rng)
        | {
            "head_dim": rng.choice([8, 12]),
            "rope_parameters": rope,
            "first_k_dense_replace": rng.choice([0, 1, 2, 5]),
            "use_qk_norm": rng.random() < 0.5,
            "attention_bias": rng.random() < 0.5,
        }
    )


def glm4_moe_lite(rng: random.Random) -> dict[str, Any]:
    base, heads = _base(rng), rng.choice([1, 3, 4])
    kinds = [rng.choice(["dense", "sparse"]) for _ in range(base["num_hidden_layers"])]
    return (
        base
        | _glm_experts(rng)
        | {
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "q_lora_rank": rng.choice([None, 10, 24]),
            "kv_lora_rank": rng.choice([7, 16]),
            "qk_rope_head_dim": rng.choice([4, 8]),
            "qk_nope_head_dim": rng.choice([5, 16]),
            "v_head_dim": rng.choice([6, 24]),
            "rope_parameters": _rope(rng, False),
            "mlp_layer_types": rng.choice([None, kinds]),
        }
    )


FAMILIES = {
    "llama": ("Llama", llama),
    "qwen3": ("Qwen3", qwen3),
    "qwen3_moe": ("Qwen3Moe", qwen3_moe),
    "glm4_moe": ("Glm4Moe", glm4_moe),
    "glm4_moe_lite": ("Glm4MoeLite", glm4_moe_lite),
}


def random_config(family: str, seed: int) -> tuple[str, dict[str, Any]]:
    """Prefix of transformers' classes, and the values of a configuration; the same for a seed."""
    name, make = FAMILIES[family]
    return name, make(random.Random(f"{family} {seed}"))
