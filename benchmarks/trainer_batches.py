"""Model, batches and settings that all trainers of `benchmarks/trainer.py` share."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

MODEL = "random Qwen3, 3 layers x 256, 8/4 heads of 32, feed-forward 768, vocabulary 4096, float32"
VOCAB = 4096
PROMPT = 64
TURN = 32
CAP = 8192
"""Tokens that a micro-batch may hold, padding included."""

GROUP = 2
LR, BETAS, WEIGHT_DECAY, CLIP_NORM = 1e-4, (0.9, 0.98), 0.1, 1.0
EPS_LOW, EPS_HIGH, TIS_CLIP = 0.2, 0.28, 2.0


def make_model(directory: Path) -> None:
    """Write `MODEL` as a Hugging Face directory."""
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=256,
        num_hidden_layers=3,
        intermediate_size=768,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=16384,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)


def agent_lengths(count: int = 8) -> list[int]:
    """Lengths of agents' trajectories: most short, a few long; in the order they were drawn.

    With padding they are 1.55 times as many tokens; over seeds the median is 1.73.
    """
    dice = random.Random(2)
    return [min(4096, max(192, round(dice.lognormvariate(6.4, 0.9)))) for _ in range(count)]


BATCHES = {"512": [512] * 8, "2048": [2048] * 2, "8192": [8192] * 2, "varied": agent_lengths()}


def make_rollout(path: Path, lengths: list[int], share: float, vocab: int = VOCAB) -> None:
    """Random trajectories in groups of GROUP, as the trainer reads them.

    After the prompt `share` of the tokens are sampled, in turns of TURN tokens. The engine's
    log-probabilities differ from the model's by an amount of each trajectory's own, so that the
    importance weights, and with them the loss, depend on what the model computes.
    """
    dice = torch.Generator().manual_seed(1)
    trajectories = []
    for number, length in enumerate(lengths):
        turn = ((torch.arange(length) - PROMPT) // TURN).double()
        sampled = (torch.arange(length) >= PROMPT) & (
            ((turn + 1) * share + 1e-9).floor() > (turn * share + 1e-9).floor()
        )
        offset = 0.4 * torch.randn(1, generator=dice)
        noise = 0.2 * torch.randn(length, generator=dice)
        sample = {
            "tokens": torch.randint(0, vocab, (length,), generator=dice),
            "loss_mask": sampled.to(torch.uint8),
            "logprobs": (offset + noise - math.log(vocab)) * sampled,
            "turns": [],
        }
        reward = float(torch.rand(1, generator=dice))
        name = f"trial-{number}"
        trajectories.append({"trial_id": name, "reward": reward, "samples": [sample]})
    groups = [
        {"group_id": str(at), "trajectories": trajectories[at : at + GROUP]}
        for at in range(0, len(trajectories), GROUP)
    ]
    torch.save({"step": 0, "weight_version": 0, "groups": groups}, path)


@dataclass
class Padded:
    """A micro-batch of b trajectories as rows of s tokens, padded at the end.

    `tokens`, `attention`, `sampled` (trained on) and `rollout` [b, s], `advantages` [b].
    """

    tokens: torch.Tensor
    attention: torch.Tensor
    sampled: torch.Tensor
    rollout: torch.Tensor
    advantages: torch.Tensor


def padded_micro_batches(path: Path) -> list[Padded]:
    """A rollout's trajectories in the order they came: rows are added to a micro-batch, padded to
    the longest, as long as CAP allows."""
    samples, advantages = [], []
    for group in torch.load(path, weights_only=True)["groups"]:
        rewards = torch.tensor([t["reward"] for t in group["trajectories"]], dtype=torch.float64)
        advantages += ((rewards - rewards.mean()) / (rewards.std() + 1e-6)).tolist()
        samples += [t["samples"][0] for t in group["trajectories"]]
    rows: list[list[int]] = []
    for number in range(len(samples)):
        longest = max(len(samples[i]["tokens"]) for i in [*(rows[-1] if rows else []), number])
        if rows and (len(rows[-1]) + 1) * longest <= CAP:
            rows[-1].append(number)
        else:
            rows.append([number])
    return [_pad([samples[i] for i in row], [advantages[i] for i in row]) for row in rows]


def _pad(samples: list[dict[str, Any]], advantages: list[float]) -> Padded:
    def pad(name: str) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence([s[name] for s in samples], batch_first=True)

    lengths = torch.tensor([len(s["tokens"]) for s in samples])
    attention = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
    return Padded(
        pad("tokens"),
        attention,
        pad("loss_mask").float(),
        pad("logprobs"),
        torch.tensor(advantages, dtype=torch.float32),
    )


def padded_tokens(lengths: list[int]) -> int:
    """Tokens of `padded_micro_batches`, padding included."""
    total, count, longest = 0, 0, 0
    for length in lengths:
        if count and (count + 1) * max(longest, length) > CAP:
            total, count, longest = total + count * longest, 0, 0
        count, longest = count + 1, max(longest, length)
    return total + count * longest
