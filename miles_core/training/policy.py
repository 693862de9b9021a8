"""The policy of this rank: log-probabilities of samples, updates, and the reference's weights."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from miles_core.modeling import dist_state, lora, schedule
from miles_core.modeling.cut import Cut
from miles_core.modeling.gpt import build_model
from miles_core.modeling.hf_config import ModelSpec
from miles_core.modeling.hf_weights import HFReader, load_hf
from miles_core.modeling.log_probs import Head, log_probs_and_entropy, token_log_probs
from miles_core.modeling.routing import RoutedPass
from miles_core.training.batch import Packed, TrainSample
from miles_core.training.config import TrainerConfig
from miles_core.training.routing import RoutingReplay
from miles_core.training.trained_model import MicroBatches, TrainedModel, packed_batches


class Policy(TrainedModel):
    """Model, optimizer and, when given, a second set of weights as the reference. A model with
    adapters is its own reference, without them."""

    def __init__(self, config: TrainerConfig, spec: ModelSpec) -> None:
        self.spec = spec
        dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
        model = build_model(
            spec,
            config.tensor_model_parallel_size,
            dtype,
            config.sequence_parallel,
            config.recompute,
        )
        if config.lora is not None:
            lora.attach(model, spec, config.lora)
        super().__init__(config, model, config.lr, config.lr_warmup_steps)
        self.routing = RoutingReplay(config, spec, self.model) if config.replays_routing else None
        self.base: str | Path | None = None
        self._reference: list[torch.Tensor] | None = None

    @property
    def has_reference(self) -> bool:
        frozen = self.model.lora is not None and self.config.needs_reference
        return frozen or self._reference is not None

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
        if self.model.lora is not None:
            with self.model.lora.off():
                yield
            return
        assert self._reference is not None
        own = self._weights()
        self._set_weights(self._reference)
        try:
            yield
        finally:
            self._set_weights(own)

    def run(
        self,
        name: str,
        batches: list[Packed],
        last: schedule.Last,
        *,
        backward: bool,
        routed: RoutedPass | None = None,
    ) -> None:
        """A pass in which routing replay, where it is asked for, has its part."""
        if self.routing is not None:
            routed = self.routing.start(name, batches, backward)
        super().run(name, batches, last, backward=backward, routed=routed)
        if self.routing is not None and routed is not None:
            self.routing.end(name, routed, batches)

    @torch.no_grad()
    def record(self, name: str, micro_batches: MicroBatches) -> dict[str, float]:
        """Give every sample its log-probabilities under `name`; this rank's sum of entropies.
        Collective."""
        batches = packed_batches(micro_batches, self.device)
        values: list[torch.Tensor] = []
        entropy = torch.zeros(1, dtype=torch.float64, device=self.device)

        def last(head: Head, targets: torch.Tensor, number: int, cut: Cut) -> torch.Tensor:
            log_probs, entropies = log_probs_and_entropy(head, targets, self.config.temperature)
            values.append(cut.join(log_probs))
            entropy.add_(cut.join(entropies).double().sum())
            return values[-1].sum()

        self.run(name, batches, last, backward=False)
        for packed, part in self.everywhere(batches, values):
            packed.keep(name, part)
        return {"entropy": schedule.from_last_stage(entropy).item()}

    def record_reference(self, micro_batches: MicroBatches) -> None:
        """Give every sample the reference's log-probabilities, as "ref"."""
        with self._as_reference():
            self.record("ref", micro_batches)

    def _outputs(self, head: Head, targets: torch.Tensor, packed: Packed, cut: Cut) -> torch.Tensor:
        """Log-probabilities of the sampled tokens; `packed.entropy` is filled when the loss uses
        it."""
        temperature = self.config.temperature
        if self.config.entropy_coef == 0:
            return cut.join(token_log_probs(head, targets, temperature))
        log_probs, entropy = log_probs_and_entropy(head, targets, temperature)
        packed.entropy = cut.join(entropy)
        return cut.join(log_probs)

    def _keep(self, packed: Packed, values: torch.Tensor) -> None:
        packed.keep("current", values)

    def _inputs(self, sample: TrainSample) -> dict[str, torch.Tensor]:
        log_probs = {"rollout": sample.rollout, **sample.logprobs}
        inputs = {f"{name} log-probabilities": value for name, value in log_probs.items()}
        if sample.values is not None:
            inputs["values of the critic"] = sample.values
        return inputs

    def load_base(self, directory: str | Path) -> None:
        """Weights alone, from a converted model or a Hugging Face directory, which is remembered
        as the `base` of adapters. Collective."""
        self.base = directory
        if dist_state.is_torch_dist(directory):
            dist_state.load_base(directory, self.model)
        else:
            load_hf(self.model, self.spec, HFReader(directory))

    def load(self, directory: str) -> bool:
        """Weights, and from an own checkpoint everything else that the next update depends on;
        whether it was one. Collective."""
        extra = dist_state.load(directory, self.model, self.optimizer)
        if extra is not None:
            self.refused_updates = extra["refused_updates"]
        return extra is not None

    def state(self) -> dist_state.State:
        """Everything of this rank that the next update depends on."""
        extra = {"refused_updates": self.refused_updates}
        return dist_state.collect(self.model, self.optimizer, extra)
