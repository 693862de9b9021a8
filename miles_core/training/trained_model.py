"""A model of this rank with its optimizer: passes over packed samples and guarded updates."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from miles_core.modeling import parallel, schedule
from miles_core.modeling.cut import Cut
from miles_core.modeling.gpt import PolicyModel
from miles_core.modeling.log_probs import Head
from miles_core.modeling.optim import AdamSettings, Optimizer
from miles_core.modeling.routing import RoutedPass
from miles_core.training.batch import Packed, TrainSample, make_sample
from miles_core.training.config import TrainerConfig
from miles_core.training.errors import NonFiniteError
from miles_core.training.guards import MAX_NAMES, gather_names, true_anywhere
from miles_core.training.reduce import max_over_ranks, sum_over_ranks

MicroBatches = Sequence[list[TrainSample]]
Loss = Callable[[torch.Tensor, Packed], tuple[torch.Tensor, dict[str, torch.Tensor]]]


@dataclass
class Update:
    """What one optimizer step did; `sums` over all ranks, `problems`: why it was refused."""

    sums: dict[str, float]
    grad_norm: float
    lr: float
    problems: list[str] = field(default_factory=list)

    @property
    def applied(self) -> bool:
        return not self.problems


def _nothing_to_train(device: torch.device) -> Packed:
    """A micro-batch of one token that gives neither loss nor gradient."""
    return Packed([make_sample("", 0, 0, torch.zeros(1), torch.zeros(1))], device)


def packed_batches(micro_batches: MicroBatches, device: torch.device) -> list[Packed]:
    """The micro-batches with something to train on. Collective.

    Data-parallel ranks need not agree on their number, unless experts are spread over them: a pass
    then needs all of these ranks, and those with fewer micro-batches take part with empty ones.
    """
    packed = [p for p in (Packed(s, device) for s in micro_batches if s) if len(p.targets)]
    if parallel.experts_are_spread():
        most = int(max_over_ranks({"micro_batches": float(len(packed))})["micro_batches"])
        packed += [_nothing_to_train(device) for _ in range(most - len(packed))]
    return packed


class TrainedModel(ABC):
    """What policy and critic share. A subclass says what the last pipeline stage makes of the
    model's outputs, and where the samples keep it."""

    def __init__(
        self, config: TrainerConfig, model: PolicyModel, lr: float, warmup_steps: int
    ) -> None:
        self.config = config
        self.device = parallel.device()
        self.model = model
        settings = AdamSettings(
            lr=lr,
            warmup_steps=warmup_steps,
            weight_decay=config.weight_decay,
            beta1=config.adam_beta1,
            beta2=config.adam_beta2,
            clip_grad=config.clip_grad,
            offload=config.optimizer_cpu_offload,
        )
        self.optimizer = Optimizer(model, settings)
        self.refused_updates = 0

    @abstractmethod
    def _outputs(self, head: Head, targets: torch.Tensor, packed: Packed, cut: Cut) -> torch.Tensor:
        """A value [N] for each sampled token of a micro-batch, with gradients, from what the model
        gives at this rank's n places."""

    @abstractmethod
    def _keep(self, packed: Packed, values: torch.Tensor) -> None:
        """Give the samples of a micro-batch these values [N]."""

    @abstractmethod
    def _inputs(self, sample: TrainSample) -> dict[str, torch.Tensor]:
        """What the loss reads of a sample, [T] each, by a name for a person."""

    def run(
        self,
        name: str,
        batches: list[Packed],
        last: schedule.Last,
        *,
        backward: bool,
        routed: RoutedPass | None = None,
    ) -> None:
        """All micro-batches through the pipeline, in the pass called `name`; see `schedule.run`."""
        packed = self.config.packing
        schedule.run(self.model, batches, last, packed=packed, backward=backward, routed=routed)

    def everywhere(
        self, batches: list[Packed], values: list[torch.Tensor]
    ) -> Iterable[tuple[Packed, torch.Tensor]]:
        """Each micro-batch with its values, on all ranks that work on the same samples; only the
        last pipeline stage has them before."""
        sizes = [len(batch.targets) for batch in batches]
        flat = torch.cat(values) if values else torch.empty(sum(sizes))
        return zip(batches, schedule.from_last_stage(flat).split(sizes), strict=True)

    def update(self, micro_batches: MicroBatches, loss: Loss, names: Sequence[str]) -> Update:
        """One optimizer step over this rank's micro-batches. Collective.

        `loss` gives the micro-batch's share of the loss, with global denominators, and sums called
        `names`. A step with a non-finite loss or gradient is not applied.
        Raises NonFiniteError when more than `max_nonfinite_steps` were refused.
        """
        self.optimizer.zero_grad()
        batches = packed_batches(micro_batches, self.device)
        totals = dict.fromkeys(names, 0.0)
        outputs: list[torch.Tensor] = []
        bad: list[str] = []

        def last(head: Head, targets: torch.Tensor, number: int, cut: Cut) -> torch.Tensor:
            packed = batches[number]
            values = self._outputs(head, targets, packed, cut)
            outputs.append(values.detach())
            if not len(packed.targets):
                return values.sum()
            share, sums = loss(values, packed)
            for name, value in sums.items():
                totals[name] += float(value)
            if not math.isfinite(float(share.detach())):
                self._keep(packed, values)
                bad.extend(self._suspects(packed))
            return share

        self.run("update", batches, last, backward=True)
        for packed, part in self.everywhere(batches, outputs):
            self._keep(packed, part)
        vector = torch.tensor([totals[name] for name in names], dtype=torch.float64)
        totals = dict(zip(names, schedule.from_last_stage(vector).tolist(), strict=True))
        update = Update(sum_over_ranks(totals, names), 0.0, self.optimizer.lr())
        update.grad_norm = self.optimizer.reduce_gradients()
        update.problems = self._problems(update, bad)
        if update.applied:
            self.optimizer.step()
        else:
            self._refuse(update)
        self.optimizer.zero_grad()
        return update

    def _suspects(self, packed: Packed) -> list[str]:
        """Which values of which trials are not finite; all trials when each value is finite."""
        found = []
        for sample in packed.samples:
            for name, value in self._inputs(sample).items():
                if not torch.isfinite(value[sample.mask]).all():
                    found.append(f"{name} of {sample.trial_id}")
        return found or [f"trial {sample.trial_id}" for sample in packed.samples]

    def _problems(self, update: Update, bad: list[str]) -> list[str]:
        """Why the update must not be applied; the ranks agree. Collective."""
        finite = math.isfinite(update.grad_norm) and self.optimizer.gradients_are_finite()
        wrong_loss, wrong_gradient = true_anywhere(
            [bool(bad) or not math.isfinite(update.sums["loss"]), not finite]
        )
        problems = []
        if wrong_loss:
            suspects = sorted(gather_names(bad))
            problems.append(f"loss, from {', '.join(suspects[:MAX_NAMES]) or 'unknown'}")
        if wrong_gradient:
            names = gather_names(self.optimizer.non_finite_parameters())
            problems.append(
                f"gradient of {len(names)} parameters: {', '.join(names[:MAX_NAMES])}"
                if names
                else "norm of the gradient, which is finite, is too large for float32"
            )
        return problems

    def _refuse(self, update: Update) -> None:
        self.refused_updates += 1
        if self.refused_updates > self.config.max_nonfinite_steps:
            raise NonFiniteError(
                f"{self.refused_updates} updates were non-finite, more than max_nonfinite_steps "
                f"({self.config.max_nonfinite_steps}); the last: {'; '.join(update.problems)}"
            )
