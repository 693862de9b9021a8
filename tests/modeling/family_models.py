"""Tiny random Hugging Face models of the families with experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCAB = 96
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
GROUPED = {"num_key_value_heads": 2, "head_dim": 16}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3Moe", {**GROUPED, "num_experts": 4, "norm_topk_prob": True}),
    "qwen3_moe_unnormalised": ("Qwen3Moe", {**GROUPED, "num_experts": 4, "mlp_only_layers": [1]}),
    "glm4_moe": (
        "Glm4Moe",
        {
            **GROUPED,
            "n_routed_experts": 4,
            "use_qk_norm": True,
            "attention_bias": True,
            "routed_scaling_factor": 2.5,
        },
    ),
    "glm4_moe_lite": ("Glm4MoeLite", {**LATENT, "n_routed_experts": 4, "q_lora_rank": 24}),
    "glm4_moe_lite_direct": (
        "Glm4MoeLite",
        {**LATENT, "n_routed_experts": 4, "q_lora_rank": None, "n_shared_experts": 2},
    ),
}


def make_moe(directory: Path, kind: str, tied: bool = False, layers: int = 2) -> Path:
    """A random model; norms, biases and the experts' selection biases are random too."""
    import transformers

    torch.manual_seed(7)
    name, values = MODELS[kind]
    config = getattr(transformers, f"{name}Config")(
        **BASE, **values, num_hidden_layers=layers, tie_word_embeddings=tied
    )
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for label, param in model.named_parameters():
            mean, std = (1.0, 0.2) if "norm" in label else (0.0, 0.15)
            torch.nn.init.normal_(param, mean, std)
        for label, buffer in model.named_buffers():
            if "correction_bias" in label:
                buffer.normal_(0.0, 0.3)
    model.save_pretrained(directory)
    return directory
