"""From `rollout_data/<step>.pt` to samples, and from samples to packed tensors."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from miles_core.training.losses import TokenData
from miles_core.training.value_loss import ValueData

REMEDY = "remove the file, and the step is rolled out anew"


@dataclass
class TrainSample:
    """One token sequence of a trajectory.

    `tokens` int64 [T], `mask` bool [T] (true: sampled, trained), `rollout` float32 [T]. The
    log-probabilities `old`, `ref` and `current` [T] are filled while training, zero off the mask,
    as are `advantages` [T] and, where the loss uses them, the importance weights `tis` [T] and
    `sequence_log_ratio`, the mean of current - old over all sampled tokens of the trajectory. With
    a critic, `values` [T] are its values before the step and `returns` [T] its targets.

    For routing replay, `engine_experts` [T - 1, layers * k] integers are the experts of all layers
    that the engine chose, `experts` [T, layers, k] int16 those of this rank's layers that a pass
    is given, -1 where a token chooses itself.
    """

    trial_id: str
    trajectory: int
    index: int
    tokens: torch.Tensor
    mask: torch.Tensor
    rollout: torch.Tensor
    advantages: torch.Tensor
    weight: float = 0.0
    micro_batch: int = -1
    tis: torch.Tensor | None = None
    sequence_log_ratio: float | None = None
    values: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    logprobs: dict[str, torch.Tensor] = field(default_factory=dict)
    engine_experts: torch.Tensor | None = None
    experts: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.tokens)


def make_sample(
    trial_id: str,
    trajectory: int,
    index: int,
    tokens: torch.Tensor,
    mask: torch.Tensor,
    rollout: torch.Tensor | None = None,
) -> TrainSample:
    """A sample whose shapes were checked, with advantages of zero. Raises ValueError naming the
    trial."""
    where = f"sample {index} of {trial_id}"
    if len(tokens) == 0:
        raise ValueError(f"{where} is empty")
    if rollout is None:
        rollout = torch.zeros(len(tokens))
    if not tokens.shape == mask.shape == rollout.shape == (len(tokens),):
        shapes = ", ".join(str(tuple(part.shape)) for part in (tokens, mask, rollout))
        raise ValueError(f"{where}: the shapes of tokens, mask and logprobs are {shapes}")
    if tokens.is_floating_point():
        raise ValueError(f"{where}: tokens are {tokens.dtype}, not integers")
    if ((mask != 0) & (mask != 1)).any():
        raise ValueError(f"{where}: the mask has other values than 0 and 1")
    mask = mask.bool()
    if mask[0]:
        raise ValueError(f"{where}: the first token is marked as sampled, but nothing precedes it")
    return TrainSample(
        trial_id,
        trajectory,
        index,
        tokens.long(),
        mask,
        rollout.float(),
        advantages=torch.zeros(len(tokens)),
    )


@dataclass
class RolloutBatch:
    """All samples of a step; `rewards` and `tokens` (sampled ones) of each trajectory.

    `groups` are the numbers of the trajectories of each group.
    """

    step: int
    samples: list[TrainSample]
    rewards: list[float]
    tokens: list[int]
    groups: list[range]


def load_rollout(path: str | Path) -> RolloutBatch:
    """Read a step's rollout.

    Raises ValueError that names the file and the field for a file that is damaged, and the trial
    for a reward that is not finite or a sample whose parts do not fit each other.
    """
    data = _read(path)
    try:
        return _to_batch(data)
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        field = _first_fault(data)
        raise ValueError(f"{path}: {field} is missing or malformed; {REMEDY}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _read(path: str | Path) -> Any:
    try:
        damaged = zipfile.ZipFile(path).testzip()  # what is mapped is checked by nobody else
        if damaged is not None:
            raise ValueError(f"the digest of {damaged} is wrong")
        return torch.load(path, weights_only=True, mmap=True)
    except FileNotFoundError:
        raise
    except Exception as error:  # torch and pickle raise many kinds for a damaged file
        reason = str(error).strip().splitlines()[:1]
        raise ValueError(
            f"{path} cannot be read: {type(error).__name__}: {''.join(reason)}; {REMEDY}"
        ) from error


def _to_batch(data: Any) -> RolloutBatch:
    batch = RolloutBatch(int(data["step"]), [], [], [], [])
    for group in data["groups"]:
        first = len(batch.rewards)
        for trajectory in group["trajectories"]:
            _add_trajectory(batch, trajectory)
        batch.groups.append(range(first, len(batch.rewards)))
    return batch


def _first_fault(data: Any) -> str:
    """The place of the first thing in a rollout that is not what it should be."""
    if not isinstance(data, dict) or not isinstance(data.get("step"), int):
        return "step"
    if not isinstance(data.get("groups"), list):
        return "groups"
    for g, group in enumerate(data["groups"]):
        if not isinstance(group, dict) or not isinstance(group.get("trajectories"), list):
            return f"groups[{g}].trajectories"
        for t, trajectory in enumerate(group["trajectories"]):
            fault = _trajectory_fault(trajectory)
            if fault:
                return f"groups[{g}].trajectories[{t}]{fault}"
    return "the content"


def _trajectory_fault(trajectory: Any) -> str:
    if not isinstance(trajectory, dict):
        return " itself"
    for name, kind in (("trial_id", str), ("reward", (int, float)), ("samples", list)):
        if not isinstance(trajectory.get(name), kind):  # type: ignore[arg-type]
            return f".{name}"
    for s, sample in enumerate(trajectory["samples"]):
        for name in ("tokens", "loss_mask", "logprobs"):
            if not isinstance(sample, dict) or not torch.is_tensor(sample.get(name)):
                return f".samples[{s}].{name}"
    return ""


def _add_trajectory(batch: RolloutBatch, trajectory: dict[str, Any]) -> None:
    trial_id, reward = trajectory["trial_id"], float(trajectory["reward"])
    if not math.isfinite(reward):
        raise ValueError(f"the reward of {trial_id} is {reward}; rewards must be finite")
    samples = [
        make_sample(
            trial_id,
            len(batch.rewards),
            index,
            sample["tokens"],
            sample["loss_mask"],
            sample["logprobs"],
        )
        for index, sample in enumerate(trajectory["samples"])
    ]
    for made, sample in zip(samples, trajectory["samples"], strict=True):
        made.engine_experts = sample.get("routed_experts")
    batch.samples.extend(samples)
    batch.rewards.append(reward)
    batch.tokens.append(sum(int(s.mask.sum()) for s in samples))


class Packed:
    """Samples of one micro-batch, one behind the other.

    `rows` [N] are the places in `tokens` [T] whose logits predict the N sampled tokens `targets`.
    `entropy` [N] of those predictions, with gradients, is set when the loss has an entropy bonus.
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
        self.entropy: torch.Tensor | None = None
        self._device = device

    def _flat(self, per_sample: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(per_sample)[self._mask].to(self._device)

    def _spread(self, values: list[float]) -> torch.Tensor:
        per_token = torch.repeat_interleave(torch.tensor(values), torch.tensor(self.counts))
        return per_token.to(self._device)

    def logprobs(self, name: str) -> torch.Tensor:
        """Log-probabilities `name` of the sampled tokens, [N]."""
        return self._flat([s.logprobs[name] for s in self.samples])

    def parts(self, values: torch.Tensor) -> Iterator[tuple[TrainSample, torch.Tensor]]:
        """Each sample with its part of `values` [N] as [T], zero where nothing was sampled."""
        full = torch.zeros(len(self._mask), dtype=torch.float32)
        full[self._mask] = values.detach().float().cpu()
        for sample, part in zip(self.samples, full.split(self.lengths), strict=True):
            yield sample, part.clone()

    def keep(self, name: str, values: torch.Tensor) -> None:
        """Give each sample its part of `values` [N] as log-probabilities `name`."""
        for sample, part in self.parts(values):
            sample.logprobs[name] = part

    def experts(self) -> torch.Tensor | None:
        """The experts [T, layers, k] that the tokens are given, -1: none; None: to no token."""
        given = [s.experts for s in self.samples if s.experts is not None]
        if not given:
            return None
        parts = [
            given[0].new_full((len(s), *given[0].shape[1:]), -1) if s.experts is None else s.experts
            for s in self.samples
        ]
        return torch.cat(parts)

    def keep_experts(self, taken: torch.Tensor) -> None:
        """Give each sample its part of the experts [T, layers, k] that a pass took."""
        for sample, part in zip(self.samples, taken.split(self.lengths), strict=True):
            sample.experts = part.clone()

    def weights(self) -> torch.Tensor:
        return self._spread([s.weight for s in self.samples])

    def value_data(self) -> ValueData:
        """What the loss of a critic needs."""
        return ValueData(
            returns=self._flat([s.returns for s in self.samples if s.returns is not None]),
            old=self._flat([s.values for s in self.samples if s.values is not None]),
            weights=self.weights(),
        )

    def token_data(self, with_reference: bool) -> TokenData:
        """What the loss needs."""
        tis = [s.tis for s in self.samples if s.tis is not None]
        ratios = [s.sequence_log_ratio for s in self.samples if s.sequence_log_ratio is not None]
        return TokenData(
            advantages=self._flat([s.advantages for s in self.samples]),
            weights=self.weights(),
            old=self.logprobs("old"),
            ref=self.logprobs("ref") if with_reference else None,
            tis=self._flat(tis) if tis else None,
            sequence_log_ratio=self._spread(ratios) if ratios else None,
            entropy=self.entropy,
        )
