"""The model of this rank with its optimizer: passes over packed samples and guarded updates."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from miles_core.modeling import dist_state, parallel, schedule
from miles_core.modeling.cut import Cut
from miles_core.modeling.gpt import build_model
from miles_core.modeling.hf_config import ModelSpec
from miles_core.modeling.log_probs import Head, log_probs_and_entropy, token_log_probs
from miles_core.modeling.optim import AdamSettings, Optimizer
from miles_core.training.batch import Packed, TrainSample, make_sample
from miles_core.training.config import TrainerConfig
from miles_core.training.guards import MAX_NAMES, gather_names, true_anywhere
from miles_core.training.routing import RoutingReplay

MicroBatches = Sequence[list[TrainSample]]
Loss = Callable[[torch.Tensor, Packed], tuple[torch.Tensor, dict[str, torch.Tensor]]]


class NonFiniteError(RuntimeError):
    """More updates had a non-finite loss or gradient than are allowed."""


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


def _full(micro_batches: MicroBatches, device: torch.device) -> list[Packed]:
    """The micro-batches with something to train on. Collective.

    Data-parallel ranks need not agree on their number, unless experts are spread over them: a pass
    then needs all of these ranks, and those with fewer micro-batches take part with empty ones.
    """
    packed = [p for p in (Packed(s, device) for s in micro_batches if s) if len(p.targets)]
    if parallel.experts_are_spread():
        most = int(max_over_ranks({"micro_batches": float(len(packed))})["micro_batches"])
        packed += [_nothing_to_train(device) for _ in range(most - len(packed))]
    return packed


def _suspects(packed: Packed) -> list[str]:
    """Which values of which trials are not finite; all trials when each value alone is finite."""
    found = []
    for sample in packed.samples:
        values = {"rollout": sample.rollout, **sample.logprobs}
        for name, value in values.items():
            if not torch.isfinite(value[sample.mask]).all():
                found.append(f"{name} log-probabilities of {sample.trial_id}")
    return found or [f"trial {sample.trial_id}" for sample in packed.samples]


def sum_over_ranks(values: dict[str, float], names: Sequence[str]) -> dict[str, float]:
    """Sums over the data-parallel ranks of the values called `names` (absent: 0). Collective."""
    vector = torch.tensor([values.get(name, 0.0) for name in names], dtype=torch.float64)
    vector = vector.to(parallel.device())
    dist.all_reduce(vector, group=parallel.dp_group())
    return dict(zip(names, vector.tolist(), strict=True))


def max_over_ranks(values: dict[str, float]) -> dict[str, float]:
    """Maxima over all ranks; every rank gives the same names. Collective."""
    vector = torch.tensor(list(values.values()), dtype=torch.float64, device=parallel.device())
    dist.all_reduce(vector, op=dist.ReduceOp.MAX)
    return dict(zip(values, vector.tolist(), strict=True))


class Policy:
    """Model, optimizer and, when given, a second set of weights as the reference."""

    def __init__(self, config: TrainerConfig, spec: ModelSpec) -> None:
        self.config = config
        self.device = parallel.device()
        dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
        self.model = build_model(
            spec,
            config.tensor_model_parallel_size,
            dtype,
            config.sequence_parallel,
            config.recompute,
        )
        self.optimizer = Optimizer(
            self.model,
            AdamSettings(
                lr=config.lr,
                warmup_steps=config.lr_warmup_steps,
                weight_decay=config.weight_decay,
                beta1=config.adam_beta1,
                beta2=config.adam_beta2,
                clip_grad=config.clip_grad,
            ),
        )
        self.refused_updates = 0
        self.routing = RoutingReplay(config, spec, self.model) if config.replays_routing else None
        self._reference: list[torch.Tensor] | None = None

    @property
    def has_reference(self) -> bool:
        return self._reference is not None

    def load_reference(self, directory: str) -> None:
        """Read the reference's weights; the policy's own are left as they are. Collective."""
        own = self._weights()
        dist_state.load(directory, self.model)
        self._reference = self._weights()
        self._set_weights(own)

    def _weights(self) -> list[torch.Tensor]:
        return [value.detach().to("cpu", copy=True) for _, value in self.model.stored_tensors()]

    @torch.no_grad()
    def _set_weights(self, weights: list[torch.Tensor]) -> None:
        for (_, own), value in zip(self.model.stored_tensors(), weights, strict=True):
            own.copy_(value)

    @contextmanager
    def _as_reference(self) -> Any:
        assert self._reference is not None
        own = self._weights()
        self._set_weights(self._reference)
        try:
            yield
        finally:
            self._set_weights(own)

    def _run(
        self, name: str, batches: list[Packed], last: schedule.Last, *, backward: bool
    ) -> None:
        routed = self.routing.start(name, batches, backward) if self.routing else None
        schedule.run(
            self.model,
            batches,
            last,
            packed=self.config.packing,
            backward=backward,
            routed=routed,
        )
        if self.routing is not None and routed is not None:
            self.routing.end(name, routed, batches)

    def _keep(self, name: str, batches: list[Packed], values: list[torch.Tensor]) -> None:
        """Give every sample its part of the values of each micro-batch, on all ranks that work on
        the same samples; only the last pipeline stage has them."""
        sizes = [len(batch.targets) for batch in batches]
        flat = torch.cat(values) if values else torch.empty(sum(sizes))
        for batch, part in zip(batches, schedule.from_last_stage(flat).split(sizes), strict=True):
            batch.keep(name, part)

    @torch.no_grad()
    def record(self, name: str, micro_batches: MicroBatches) -> dict[str, float]:
        """Give every sample its log-probabilities under `name`; this rank's sum of entropies.
        Collective."""
        batches = _full(micro_batches, self.device)
        values: list[torch.Tensor] = []
        entropy = torch.zeros(1, dtype=torch.float64, device=self.device)

        def last(head: Head, targets: torch.Tensor, number: int, cut: Cut) -> torch.Tensor:
            log_probs, entropies = log_probs_and_entropy(head, targets, self.config.temperature)
            values.append(cut.join(log_probs))
            entropy.add_(cut.join(entropies).double().sum())
            return values[-1].sum()

        self._run(name, batches, last, backward=False)
        self._keep(name, batches, values)
        return {"entropy": schedule.from_last_stage(entropy).item()}

    def record_reference(self, micro_batches: MicroBatches) -> None:
        """Give every sample the reference's log-probabilities, as "ref"."""
        with self._as_reference():
            self.record("ref", micro_batches)

    def update(self, micro_batches: MicroBatches, loss: Loss, names: Sequence[str]) -> Update:
        """One optimizer step over this rank's micro-batches. Collective.

        `loss` gives the micro-batch's share of the loss, with global denominators, and sums called
        `names`. A step with a non-finite loss or gradient is not applied.
        Raises NonFiniteError when more than `max_nonfinite_steps` were refused.
        """
        self.optimizer.zero_grad()
        batches = _full(micro_batches, self.device)
        totals = dict.fromkeys(names, 0.0)
        values: list[torch.Tensor] = []
        bad: list[str] = []

        def last(head: Head, targets: torch.Tensor, number: int, cut: Cut) -> torch.Tensor:
            packed = batches[number]
            log_probs = self._log_probs(head, targets, packed, cut)
            values.append(log_probs.detach())
            if not len(packed.targets):
                return log_probs.sum()
            share, sums = loss(log_probs, packed)
            for name, value in sums.items():
                totals[name] += float(value)
            if not math.isfinite(float(share.detach())):
                packed.keep("current", log_probs)
                bad.extend(_suspects(packed))
            return share

        self._run("update", batches, last, backward=True)
        self._keep("current", batches, values)
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

    def _log_probs(
        self, head: Head, targets: torch.Tensor, packed: Packed, cut: Cut
    ) -> torch.Tensor:
        """Of the sampled tokens; `packed.entropy` is filled when the loss uses it."""
        temperature = self.config.temperature
        if self.config.entropy_coef == 0:
            return cut.join(token_log_probs(head, targets, temperature))
        log_probs, entropy = log_probs_and_entropy(head, targets, temperature)
        packed.entropy = cut.join(entropy)
        return cut.join(log_probs)

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

    def load(self, directory: str) -> None:
        """Weights, and from an own checkpoint everything else that the next update depends on."""
        extra = dist_state.load(directory, self.model, self.optimizer)
        if extra is not None:
            self.refused_updates = extra["refused_updates"]

    def save(self, directory: str) -> None:
        """Write everything that the next update depends on. Collective."""
        extra = {"refused_updates": self.refused_updates}
        dist_state.save(directory, self.model, self.optimizer, extra)
