"""`train_data/<step>/rank_<r>.pt`: what the trainer saw and computed."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from miles_core.training.batch import TrainSample


def write_dump(directory: str | Path, step: int, rank: int, samples: list[TrainSample]) -> Path:
    """Write the samples of a rank under a temporary name, sync it, rename it.

    Advantages, log-probabilities and importance weights are float32 [T], zero where nothing was
    sampled; "ref_logprobs" is absent without a reference, "tis" without importance sampling,
    "values" and "returns" without a critic.
    """
    path = Path(directory) / f"rank_{rank}.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    records = [
        {
            "trial_id": s.trial_id,
            "sample_index": s.index,
            "advantages": s.advantages,
            "tokens": s.tokens,
            "loss_mask": s.mask.to(torch.uint8),
            "rollout_logprobs": s.rollout,
            **{f"{name}_logprobs": values for name, values in s.logprobs.items()},
            **_optional(s),
            "micro_batch": s.micro_batch,
        }
        for s in samples
    ]
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "wb") as file:
        torch.save({"step": step, "rank": rank, "samples": records}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    return path


def _optional(sample: TrainSample) -> dict[str, torch.Tensor]:
    found = {"tis": sample.tis, "values": sample.values, "returns": sample.returns}
    return {name: value for name, value in found.items() if value is not None}
