"""AdamW over megatron's distributed optimizer, with its state made safe to save and to load."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.transformer.module import Float16Module

from miles_core.modeling import optim_state
from miles_core.modeling.gpt import PolicyModel
from miles_core.modeling.optim_offload import HostState
from miles_core.modeling.regions import Region


@dataclass(frozen=True)
class AdamSettings:
    """AdamW and the clip of the gradient norm; `warmup_steps` of linear warm-up, then constant.

    `offload`: the state is in host memory.
    """

    lr: float
    warmup_steps: int
    weight_decay: float
    beta1: float
    beta2: float
    clip_grad: float
    offload: bool = False


class Optimizer:
    """Gradients and updates of one model. `steps` counts the updates that were applied."""

    def __init__(self, model: PolicyModel, settings: AdamSettings) -> None:
        self._settings = settings
        self._model = model
        half = model.config.params_dtype == torch.bfloat16
        self.wrapped = DistributedDataParallel(
            model.config,
            DistributedDataParallelConfig(
                use_distributed_optimizer=True, grad_reduce_in_fp32=True, overlap_grad_reduce=False
            ),
            Float16Module(model.config, model) if half else model,
        )
        model.keep_router_biases()  # Float16Module casts them
        config = OptimizerConfig(
            optimizer="adam",
            lr=settings.lr,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.beta1,
            adam_beta2=settings.beta2,
            clip_grad=settings.clip_grad,
            bf16=half,
            params_dtype=model.config.params_dtype,
            use_distributed_optimizer=True,
        )
        self._inner: ChainedOptimizer = get_megatron_optimizer(config, [self.wrapped])
        self.steps = 0
        self._create_state()

    def _create_state(self) -> None:
        """Adam's moments and a step of its own for each parameter.

        megatron reads moments before the first update would create them.
        """
        for part in self._inner.chained_optimizers:
            if self._settings.offload:
                HostState(part)
                continue
            adam = part.optimizer
            for group in adam.param_groups:
                for param in group["params"]:
                    adam.state[param] = {
                        "step": torch.tensor(0.0),
                        "exp_avg": torch.zeros_like(param),
                        "exp_avg_sq": torch.zeros_like(param),
                    }

    def lr(self) -> float:
        """Learning rate of the next update."""
        warmup = self._settings.warmup_steps
        return self._settings.lr * min(1.0, (self.steps + 1) / max(1, warmup))

    def zero_grad(self) -> None:
        self.wrapped.zero_grad_buffer()
        self._inner.zero_grad()

    def reduce_gradients(self) -> float:
        """Sum the gradients over the ranks; their norm over the whole model (maybe non-finite)."""
        finalize_model_grads([self.wrapped])
        self._inner.prepare_grads()
        return float(self._inner.get_grad_norm())

    def gradients_are_finite(self) -> bool:
        """Whether all of this rank's gradients are, last reduced.

        The norm does not say so: of parameters that tensor-parallel ranks share it counts those of
        the first rank alone.
        """
        buffers = [*self.wrapped.buffers, *self.wrapped.expert_parallel_buffers]
        norms = [torch.linalg.vector_norm(buffer.grad_data) for buffer in buffers]
        return not norms or bool(torch.isfinite(torch.stack(norms)).all())

    def non_finite_parameters(self) -> list[str]:
        """Names of this rank's parameters with a non-finite gradient, last reduced."""
        return [
            self._model.global_name(name)
            for name, param in self._model.named_parameters()
            if param.requires_grad and not torch.isfinite(param.main_grad).all()
        ]

    def step(self) -> None:
        """Clip and apply the reduced gradients."""
        for group in self._inner.param_groups:
            group["lr"] = self.lr()
            group["weight_decay"] = self._settings.weight_decay * group.get("wd_mult", 1.0)
        applied, _, _ = self._inner.step()
        if not applied:
            raise RuntimeError("the optimizer refused a finite update")
        self.steps += 1

    def weights_were_replaced(self) -> None:
        """Take over parameters that were written from outside (for bfloat16 main copies)."""
        self._inner.reload_model_params()

    def own_ranges(self) -> dict[torch.nn.Parameter, slice]:
        """For each parameter of which this rank updates something, which of its values."""
        return optim_state.own_ranges(self._inner.chained_optimizers)

    def state_regions(self, model_state: dict[str, Any], *, saving: bool) -> Iterator[Region]:
        """This rank's state for a checkpoint, without the step of each parameter.

        With expert parallelism megatron has an optimizer for the experts and one for the rest,
        without it a single one.
        """
        return optim_state.state_regions(self._inner.chained_optimizers, model_state, saving=saving)

    def set_steps(self, steps: int) -> None:
        """The number of updates that a loaded state has seen, for every parameter on its own."""
        for part in self._inner.chained_optimizers:
            for entry in part.optimizer.state.values():
                entry["step"] = torch.tensor(float(steps))
        self.steps = steps
