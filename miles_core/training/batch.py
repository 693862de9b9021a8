"""From `rollout_data/<step>.pt` to samples, and from samples to packed tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from miles_core.training.advantages import group_advantages
from miles_core.training.losses import TokenData


@dataclass
class TrainSample:
    """One token sequence of a trajectory.

    `tokens` int64 [T], `mask` bool [T] (true: sampled, trained), `rollout` float32 [T]. The
    log-probabilities `old`, `ref` and `current` [T] are filled while training, zero off the mask.
    """

    trial_id: str
    trajectory: int
    index: int
    tokens: torch.Tensor
    mask: torch.Tensor
    rollout: torch.Tensor
    advantage: float
    weight: float = 0.0
    micro_batch: int = -1
    logprobs: dict[str, torch.Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens)


def make_sample(
    trial_id: str,
    trajectory: int,
    index: int,
    tokens: torch.Tensor,
    mask: torch.Tensor,
    rollout: torch.Tensor | None = None,
    advantage: float = 0.0,
) -> TrainSample:
    """A sample whose shapes were checked. Raises ValueError naming the trial."""
    where = f"sample {index} of {trial_id}"
    if len(tokens) == 0:
        raise ValueError(f"{where} is empty")
    if rollout is None:
        rollout = torch.zeros(len(tokens))
    if not len(tokens) == len(mask) == len(rollout):
        raise ValueError(
            f"{where}: {len(tokens)} tokens, {len(mask)} mask values, {len(rollout)} logprobs"
        )
    mask = mask.bool()
    if mask[0]:
        raise ValueError(f"{where}: the first token is marked as sampled, but nothing precedes it")
    return TrainSample(trial_id, trajectory, index, tokens.long(), mask, rollout.float(), advantage)


@dataclass
class RolloutBatch:
    """All samples of a step; `rewards` and `tokens` (sampled ones) of each trajectory."""

    step: int
    samples: list[TrainSample]
    rewards: list[float]
    tokens: list[int]


def load_rollout(path: str | Path, std_normalization: bool) -> RolloutBatch:
    """Read a step's rollout and give every sample its trajectory's advantage."""
    data = torch.load(path, weights_only=True)
    batch = RolloutBatch(int(data["step"]), [], [], [])
    for group in data["groups"]:
        trajectories = group["trajectories"]
        rewards = torch.tensor([t["reward"] for t in trajectories], dtype=torch.float64)
        advantages = group_advantages(rewards, std_normalization).tolist()
        for trajectory, advantage in zip(trajectories, advantages, strict=True):
            number = len(batch.rewards)
            samples = [
                make_sample(
                    trajectory["trial_id"],
                    number,
                    index,
                    sample["tokens"],
                    sample["loss_mask"],
                    sample["logprobs"],
                    advantage,
                )
                for index, sample in enumerate(trajectory["samples"])
            ]
            batch.samples.extend(samples)
            batch.rewards.append(float(trajectory["reward"]))
            batch.tokens.append(sum(int(s.mask.sum()) for s in samples))
    return batch


class Packed:
    """Samples of one micro-batch, one behind the other.

    `rows` [N] are the places in `tokens` [T] whose logits predict the N sampled tokens `targets`.
    """

    def __init__(self, samples: list[TrainSample], device: torch.device) -> None:
        self.samples = samples
        self.lengths = [len(s) for s in samples]
        tokens = torch.cat([s.tokens for s in samples])
        self._mask = torch.cat([s.mask for s in samples])
        sampled = self._mask.nonzero().squeeze(1)
        self.counts = [int(s.mask.sum()) for s in samples]
        self.tokens = tokens.to(device)
        self.rows = (sampled - 1).to(device)
        self.targets = tokens[sampled].to(device)
        self._device = device

    def _flat(self, per_sample: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(per_sample)[self._mask].to(self._device)

    def _spread(self, values: list[float]) -> torch.Tensor:
        per_token = torch.repeat_interleave(torch.tensor(values), torch.tensor(self.counts))
        return per_token.to(self._device)

    def logprobs(self, name: str) -> torch.Tensor:
        """Log-probabilities `name` of the sampled tokens, [N]."""
        return self._flat([s.logprobs[name] for s in self.samples])

    def keep(self, name: str, values: torch.Tensor) -> None:
        """Give each sample its part of `values` [N] as [T], zero where nothing was sampled."""
        full = torch.zeros(len(self._mask))
        full[self._mask] = values.detach().float().cpu()
        for sample, part in zip(self.samples, full.split(self.lengths), strict=True):
            sample.logprobs[name] = part.clone()

    def weights(self) -> torch.Tensor:
        return self._spread([s.weight for s in self.samples])

    def rollout(self) -> torch.Tensor:
        return self._flat([s.rollout for s in self.samples])

    def token_data(self, with_reference: bool) -> TokenData:
        """What the loss needs."""
        return TokenData(
            advantages=self._spread([s.advantage for s in self.samples]),
            weights=self.weights(),
            old=self.logprobs("old"),
            rollout=self.rollout(),
            ref=self.logprobs("ref") if with_reference else None,
        )
