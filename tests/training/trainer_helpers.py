"""Tiny models, rollouts and a worker for the trainer's tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_helpers import fork_ranks

from miles_core.modeling.gpt import PolicyModel
from miles_core.modeling.hf_config import ModelSpec
from miles_core.modeling.weight_stream import WeightStream
from miles_core.training.config import TrainerConfig
from miles_core.training.worker import TrainerWorker

VOCAB = 96
CONFIG = TrainerConfig(global_batch_size=8, lr=1e-3, temperature=0.8, kl_loss_coef=0.05)


def make_hf(directory: Path, kind: str = "qwen3", tied: bool = True) -> Path:
    """A random model of two layers; norm weights are random too, so that a lost norm shows."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(5)
    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "tie_word_embeddings": tied,
    }
    model: Any = (
        LlamaForCausalLM(LlamaConfig(**shape))
        if kind == "llama"
        else Qwen3ForCausalLM(Qwen3Config(**shape))
    )
    for name, param in model.named_parameters():
        mean, std = (1.0, 0.2) if "norm" in name else (0.0, 0.15)
        torch.nn.init.normal_(param, mean, std)
    model.save_pretrained(directory)
    return directory


def make_rollout(
    path: Path, step: int = 0, split: bool = False, seed: int = 0, groups: int = 2, members: int = 4
) -> Path:
    """Random trajectories of two samples each; with `split` every sample is cut into two that
    share tokens but not sampled ones, so the sampled tokens of a trajectory stay the same."""
    random = torch.Generator().manual_seed(seed)
    content = []
    for g in range(groups):
        trajectories = []
        for m in range(members):
            samples = []
            for _ in range(2):
                size = int(torch.randint(12, 40, (1,), generator=random))
                mask = torch.rand(size, generator=random) < 0.5
                mask[0] = False
                tokens = torch.randint(0, VOCAB, (size,), generator=random)
                logprobs = -4.5 * torch.rand(size, generator=random) * mask
                samples.extend(
                    _cut(tokens, mask, logprobs) if split else [(tokens, mask, logprobs)]
                )
            trajectories.append(
                {
                    "trial_id": f"g{g}-m{m}",
                    "reward": float(torch.rand(1, generator=random)),
                    "verdict": {"kind": "graded"},
                    "samples": [
                        {"tokens": t, "loss_mask": k.to(torch.uint8), "logprobs": p, "turns": []}
                        for t, k, p in samples
                    ],
                }
            )
        content.append({"group_id": f"g{g}", "instance_id": "task", "trajectories": trajectories})
    torch.save({"step": step, "weight_version": 0, "groups": content}, path)
    return path


def _cut(tokens: torch.Tensor, mask: torch.Tensor, logprobs: torch.Tensor) -> list[Any]:
    middle = len(tokens) // 2
    late = mask.clone()
    late[:middle] = False
    head = (tokens[:middle], mask[:middle], logprobs[:middle])
    return [head, (tokens, late, logprobs * late)]


@contextmanager
def single(load: Path, ref: Path | None = None, **changes: Any) -> Iterator[TrainerWorker]:
    """One rank in this process."""
    worker = TrainerWorker(replace(CONFIG, **changes))
    try:
        worker.init(str(load), None if ref is None else str(ref))
        yield worker
    finally:
        worker.close()


def to_hf(model: PolicyModel, spec: ModelSpec) -> dict[str, torch.Tensor]:
    """All tensors under their Hugging Face names, on rank 0. Collective."""
    stream = WeightStream(model, spec, bucket_size=1)
    into = torch.empty(stream.largest, dtype=torch.uint8) if dist.get_rank() == 0 else None
    return {
        name: tensor.clone()
        for number in range(len(stream.buckets))
        for name, tensor in stream.collect(number, into)
    }


def weights(worker: TrainerWorker) -> dict[str, torch.Tensor]:
    return to_hf(worker.policy.model, worker._spec)


def run_ranks(out: Path, world: int, calls: list[Any], **changes: Any) -> list[Any]:
    """Make `calls` ([method, *args] each) in `world` processes; the answers of rank 0."""
    return fork_ranks("rank_process", world, out, {"calls": calls, "changes": changes})[0]
