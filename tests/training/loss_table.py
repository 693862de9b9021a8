"""A policy whose parameters are the logits themselves, to compare whole steps with formulas.

Each place of a sequence takes one of a few rows of logits, so that the gradient of a loss with
respect to them shows what the tokens contribute, and a step over some trajectories moves the
probabilities of the others. All numbers are float64.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from miles_core.modeling.hf_config import ModelSpec
from miles_core.modeling.parallel import Layout
from miles_core.training.batch import Packed, RolloutBatch, TrainSample
from miles_core.training.config import TrainerConfig
from miles_core.training.grpo import GrpoStep
from miles_core.training.trained_model import Update

VOCAB = 7
ROWS = 30
LR = 15.0
LONGEST_STEP = 3.0
# of a model that would be spread over ranks; there is one rank here
SHAPE = ModelSpec(
    model_type="table",
    vocab_size=VOCAB,
    hidden_size=8,
    ffn_size=8,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    norm_eps=1e-6,
    rope_theta=1e4,
    max_positions=64,
    qk_norm=False,
    tied=False,
)


@dataclass
class Case:
    """Sequences of each trajectory: tokens, mask, engine log-probabilities and rows of logits.

    `groups` are sizes; `logits` and `ref_logits` [ROWS, VOCAB], `values` [ROWS] of a critic.
    """

    groups: list[int]
    rewards: list[float]
    sequences: list[list[dict[str, torch.Tensor]]]
    logits: torch.Tensor
    ref_logits: torch.Tensor
    values: torch.Tensor


def make_case(seed: int, groups: tuple[int, ...] = (3, 2, 4), noise: float = 0.4) -> Case:
    """Random trajectories of one to three sequences; one trajectory has no sampled token."""
    dice = torch.Generator().manual_seed(seed)
    sequences: list[list[dict[str, torch.Tensor]]] = []
    for number in range(sum(groups)):
        trajectory = []
        for _ in range(1 + number % 3):
            size = int(torch.randint(2, 9, (1,), generator=dice))
            mask = torch.rand(size, generator=dice) < 0.6
            mask[0] = False
            mask[1:] &= number != 1
            trajectory.append(
                {
                    "tokens": torch.randint(0, VOCAB, (size,), generator=dice),
                    "mask": mask,
                    "rows": torch.randint(0, ROWS, (size,), generator=dice),
                }
            )
        sequences.append(trajectory)
    logits = torch.randn(ROWS, VOCAB, generator=dice, dtype=torch.float64)
    for sequence in (s for t in sequences for s in t):
        exact = token_values(logits, sequence)[0].detach()
        off = torch.randn(len(exact), generator=dice, dtype=torch.float64) * noise
        sequence["rollout"] = (exact + off) * sequence["mask"]
    moved = 0.5 * torch.randn(ROWS, VOCAB, generator=dice, dtype=torch.float64)
    rewards = torch.rand(sum(groups), generator=dice, dtype=torch.float64).tolist()
    values = torch.rand(ROWS, generator=dice, dtype=torch.float64)
    return Case(list(groups), rewards, sequences, logits, logits + moved, values)


def token_values(
    logits: torch.Tensor, sequence: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of a sequence's tokens and entropies, [T]; row t - 1 predicts token t."""
    rows, tokens = sequence["rows"], sequence["tokens"]
    distribution = torch.log_softmax(logits[rows[:-1]], -1)
    start = torch.zeros(1, dtype=torch.float64)
    picked = distribution.gather(1, tokens[1:, None])[:, 0]
    entropy = -(distribution.exp() * distribution).sum(-1)
    return torch.cat([start, picked]), torch.cat([start, entropy])


def values_before(values: torch.Tensor, sequence: dict[str, torch.Tensor]) -> torch.Tensor:
    """The critic's value before each token of a sequence, [T]: that of row t - 1."""
    return torch.cat([torch.zeros(1, dtype=torch.float64), values[sequence["rows"][:-1]]])


def descend(logits: torch.Tensor, gradient: torch.Tensor) -> None:
    """A gradient step on a table in place, of bounded length, so that no loss diverges."""
    with torch.no_grad():
        logits -= gradient * min(LR, LONGEST_STEP / max(gradient.norm().item(), 1e-9))


def split(case: Case, cut: int = 2) -> Case:
    """Every sequence as two: the first `cut` tokens, and all of it with only the later trained."""
    pieces = []
    for trajectory in case.sequences:
        parts = []
        for whole in trajectory:
            late = whole["mask"].clone()
            late[:cut] = False
            head = {name: value[:cut] for name, value in whole.items()}
            parts += [head, {**whole, "mask": late, "rollout": whole["rollout"] * late}]
        pieces.append(parts)
    return replace(case, sequences=pieces)


class TablePolicy:
    """What `GrpoStep` needs of a policy; plain gradient steps on the logits."""

    def __init__(self, case: Case, config: TrainerConfig) -> None:
        self.config = config
        self.spec = SHAPE
        self.has_reference = config.needs_reference
        self.routing = None
        self.logits = case.logits.clone().requires_grad_()
        self.gradients: list[torch.Tensor] = []
        self.losses: list[float] = []
        self.optimizer = self
        self._case = case

    def lr(self) -> float:
        return LR

    def _values(self, logits: torch.Tensor, sample: TrainSample) -> Any:
        return token_values(logits, self._case.sequences[sample.trajectory][sample.index])

    def record_reference(self, micro_batches: list[list[TrainSample]]) -> None:
        self._record("ref", self._case.ref_logits, micro_batches)

    def record(self, name: str, micro_batches: list[list[TrainSample]]) -> dict[str, float]:
        return {"entropy": self._record(name, self.logits.detach(), micro_batches)}

    def _record(
        self, name: str, logits: torch.Tensor, micro_batches: list[list[TrainSample]]
    ) -> float:
        total = 0.0
        for sample in (s for mb in micro_batches for s in mb):
            values, entropy = self._values(logits, sample)
            sample.logprobs[name] = values * sample.mask
            total += entropy[sample.mask].sum().item()
        return total

    def update(self, micro_batches: list[list[TrainSample]], loss: Any, names: Any) -> Update:
        sums = dict.fromkeys(names, 0.0)
        gradient = torch.zeros_like(self.logits)
        for samples in filter(None, micro_batches):
            packed = Packed(samples, torch.device("cpu"))
            parts = [self._values(self.logits, s) for s in samples]
            log_probs = torch.cat([v[s.mask] for (v, _), s in zip(parts, samples, strict=True)])
            if self.config.entropy_coef > 0:
                packed.entropy = torch.cat(
                    [e[s.mask] for (_, e), s in zip(parts, samples, strict=True)]
                )
            packed.keep("current", log_probs)
            share, own = loss(log_probs, packed)
            gradient += torch.autograd.grad(share, self.logits)[0]
            for name, value in own.items():
                sums[name] += float(value)
        self.gradients.append(gradient)
        self.losses.append(sums["loss"])
        descend(self.logits, gradient)
        return Update(sums, gradient.norm().item(), LR)


class TableCritic:
    """What `GrpoStep` needs of a critic; plain gradient steps on a table of values."""

    def __init__(self, case: Case, config: TrainerConfig) -> None:
        self.config = config
        self.values = case.values.clone().requires_grad_()
        self.gradients: list[torch.Tensor] = []
        self.losses: list[float] = []
        self._case = case

    def _of(self, sample: TrainSample) -> torch.Tensor:
        return values_before(self.values, self._case.sequences[sample.trajectory][sample.index])

    def record(self, micro_batches: list[list[TrainSample]]) -> None:
        for sample in (s for mb in micro_batches for s in mb):
            sample.values = self._of(sample).detach() * sample.mask

    def update(self, micro_batches: list[list[TrainSample]], loss: Any, names: Any) -> Update:
        sums = dict.fromkeys(names, 0.0)
        gradient = torch.zeros_like(self.values)
        for samples in filter(None, micro_batches):
            packed = Packed(samples, torch.device("cpu"))
            share, own = loss(torch.cat([self._of(s)[s.mask] for s in samples]), packed)
            gradient += torch.autograd.grad(share, self.values)[0]
            for name, value in own.items():
                sums[name] += float(value)
        self.gradients.append(gradient)
        self.losses.append(sums["loss"])
        descend(self.values, gradient)
        return Update(sums, gradient.norm().item(), LR)


def run_step(
    case: Case, config: TrainerConfig, layout: Layout, critic: TableCritic | None = None
) -> tuple[TablePolicy, dict[str, Any], GrpoStep]:
    """One step of the trainer over a case, on one rank."""
    bounds = [sum(case.groups[:i]) for i in range(len(case.groups) + 1)]
    samples = [
        TrainSample(
            f"t{number}",
            number,
            index,
            sequence["tokens"],
            sequence["mask"],
            sequence["rollout"],
            torch.zeros(len(sequence["tokens"])),
        )
        for number, trajectory in enumerate(case.sequences)
        for index, sequence in enumerate(trajectory)
    ]
    batch = RolloutBatch(
        0,
        samples,
        case.rewards,
        [sum(int(s["mask"].sum()) for s in t) for t in case.sequences],
        [range(a, b) for a, b in zip(bounds, bounds[1:], strict=False)],
    )
    policy = TablePolicy(case, config)
    step = GrpoStep(policy, layout, batch, critic)  # type: ignore[arg-type]
    return policy, step.run(), step
