"""The count of FLOPs against the weights of real models and against torch's own counter."""

from pathlib import Path

import pytest
import torch
from family_models import MODELS, make_moe
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode
from trainer_helpers import make_hf
from transformers import AutoModelForCausalLM

from miles_core.modeling.flops import forward_flops, training_flops
from miles_core.modeling.hf_config import read_spec

TOKENS = 24


def model(directory: Path, kind: str) -> Path:
    return make_moe(directory, kind) if kind in MODELS else make_hf(directory, kind)


def active_weights(directory: Path) -> float:
    """Values of all matrices that a token is multiplied with; of routed experts their share."""
    spec = read_spec(directory)
    total = 0.0
    for name, value in load_file(directory / "model.safetensors").items():
        if value.ndim < 2 or "embed_tokens" in name or "lm_head" in name:
            continue
        routed = spec.moe is not None and ".experts." in name and "shared" not in name
        total += value.numel() * (spec.moe.top_k / spec.moe.num_experts if routed else 1.0)
    return total + spec.vocab_size * spec.hidden_size


@pytest.mark.parametrize("kind", ["qwen3", *MODELS])
def test_a_token_costs_two_operations_for_each_active_weight(tmp_path: Path, kind: str) -> None:
    directory = model(tmp_path / "hf", kind)
    spec = read_spec(directory)
    scores = forward_flops(spec, 2) - 2 * forward_flops(spec, 1)  # (4 - 2) halves of one pair
    one = forward_flops(spec, 1) - scores / 2
    assert one == 2 * active_weights(directory)
    head = 2 * spec.hidden_size * spec.vocab_size
    assert forward_flops(spec, 9) - forward_flops(spec, 9, logits=4) == 5 * head


@pytest.mark.parametrize("kind", ["qwen3", "glm4_moe_lite"])
def test_scores_are_half_of_what_attention_without_causality_takes(
    tmp_path: Path, kind: str
) -> None:
    directory = model(tmp_path / "hf", kind)
    spec = read_spec(directory)
    network = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )

    def counted(tokens: int) -> int:
        with FlopCounterMode(display=False) as counter:
            network(input_ids=torch.ones(1, tokens, dtype=torch.int64), use_cache=False)
        return counter.get_total_flops()

    theirs = counted(2 * TOKENS) - 2 * counted(TOKENS)  # what is linear in the tokens goes
    ours = forward_flops(spec, 2 * TOKENS) - 2 * forward_flops(spec, TOKENS)
    assert ours == theirs / 2


def test_training_is_three_forward_passes(tmp_path: Path) -> None:
    directory = make_hf(tmp_path / "hf", "qwen3", tied=False)
    spec = read_spec(directory)
    linear = torch.nn.Linear(spec.hidden_size, spec.vocab_size, bias=False)
    hidden = torch.zeros(TOKENS, spec.hidden_size, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        linear(hidden).sum().backward()
    head = training_flops(spec, TOKENS) - training_flops(spec, TOKENS, logits=0)
    assert counter.get_total_flops() == head
