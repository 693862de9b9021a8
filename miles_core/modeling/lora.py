"""The adapters of a model: where they sit, switched off for the reference, merged, and saved."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from miles_core.config.lora import (
    ATTENTION,
    LATENT_ATTENTION,
    MODULES,
    LoraSettings,
    module_fault,
)
from miles_core.modeling import parallel
from miles_core.modeling.families import weights
from miles_core.modeling.hf_config import ModelSpec
from miles_core.modeling.lora_layers import Adapter, AdapterTensor, Part, hook, merged_weight
from miles_core.modeling.mapping import Qkv, Weight

if TYPE_CHECKING:
    from miles_core.modeling.gpt import PolicyModel


ADAPTER = ".adapter."  # in the names of adapters' parameters, and of no others


@dataclass(frozen=True)
class Target:
    """A megatron weight, and the Hugging Face modules in it that get adapters (None: does not)."""

    weight: Weight
    modules: tuple[str | None, ...]


def _last(name: str) -> str:
    """q_proj of model.layers.0.self_attn.q_proj."""
    return name.rpartition(".")[2]


def _candidates(spec: ModelSpec) -> Iterator[tuple[Weight, tuple[str, ...]]]:
    for weight in weights(spec):
        names = tuple(name.removesuffix(".weight") for name in weight.theirs)
        possible = MODULES if spec.moe is None else (*ATTENTION, *LATENT_ATTENTION)
        if all(_last(name) in possible for name in names):
            yield weight, names


def targets(spec: ModelSpec, settings: LoraSettings) -> list[Target]:
    """The layers that get adapters. Raises ValueError for a name that the model does not have."""
    candidates = list(_candidates(spec))
    possible = dict.fromkeys(_last(name) for _, names in candidates for name in names)
    fault = module_fault(settings.modules, list(possible))
    if fault is not None:
        raise ValueError(f"target_modules: {fault}")
    chosen = settings.modules or possible
    found = [
        Target(weight, tuple(name if _last(name) in chosen else None for name in names))
        for weight, names in candidates
    ]
    return [target for target in found if any(target.modules)]


class Lora:
    """The adapters of a model's layers on this rank. They are children of these layers.

    `modules`: Hugging Face names of all layers of the model that have one; `kinds`: their last
    parts, sorted.
    """

    def __init__(self, settings: LoraSettings, targets: list[Target]) -> None:
        self.settings = settings
        self.modules = [name for target in targets for name in target.modules if name]
        self.kinds = sorted({_last(module) for module in self.modules})
        self._targets = targets
        self._adapters: dict[str, Adapter] = {}
        self._enabled = True

    @contextmanager
    def off(self) -> Iterator[None]:
        """The model computes as without adapters."""
        self._enabled = False
        try:
            yield
        finally:
            self._enabled = True

    def add(self, name: str, layer: torch.nn.Module, adapter: Adapter) -> None:
        """Let the layer, whose weight is called `name` in the whole model, compute with it."""
        layer.adapter = adapter
        # before hooks that are there: they expect the layer's whole output
        layer.register_forward_hook(hook(adapter, lambda: self._enabled), prepend=True)
        self._adapters[name] = adapter

    def tensors(self) -> Iterator[AdapterTensor]:
        """A and B of all projections on this rank."""
        for adapter in self._adapters.values():
            yield from adapter.tensors()

    def sharded_state(self) -> dict[str, ShardedTensor]:
        """For a checkpoint: PEFT's names and whole shapes, whatever the layout."""
        return {tensor.name: tensor.sharded() for tensor in self.tensors()}

    def changed_weights(self) -> set[str]:
        """Weights of the whole model that adapters change, by their names in it."""
        return {target.weight.ours for target in self._targets}

    def merged(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """This rank's part of the weight called `name` in the whole model, with its adapter."""
        adapter = self._adapters.get(name)
        return weight if adapter is None else merged_weight(weight, adapter.delta())


def attach(model: PolicyModel, spec: ModelSpec, settings: LoraSettings) -> None:
    """Freeze the model and give it adapters, which alone are trained; sets `model.lora`.

    Raises ValueError when a pipeline stage would have nothing to train.
    """
    chosen = targets(spec, settings)
    _refuse_idle_stages(spec, chosen)
    model.requires_grad_(False)
    layers = {model.global_name(f"{n}.weight"): m for n, m in model.named_modules() if n}
    lora = Lora(settings, chosen)
    for target in chosen:
        layer = layers.get(target.weight.ours)
        if layer is None:
            continue  # of another pipeline stage
        groups = spec.num_kv_heads // parallel.tp_group().size()
        adapter = Adapter(
            layer,
            _parts(target, layer.weight, spec),
            groups if isinstance(target.weight.cut, Qkv) else 1,
            settings,
        )
        lora.add(target.weight.ours, layer, adapter)
    if model.pre_process and model.config.recompute_granularity is not None:
        # what is computed anew passes gradients on only when its input wants them
        model.embedding.register_forward_hook(_want_gradient)
    model.lora = lora


def _parts(target: Target, weight: torch.Tensor, spec: ModelSpec) -> list[Part]:
    """The rows of each projection in this rank's weight."""
    if isinstance(target.weight.cut, Qkv):
        heads = spec.num_heads + 2 * spec.num_kv_heads
        counts = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        rows = [weight.shape[0] * count // heads for count in counts]
    else:
        rows = [weight.shape[0] // len(target.modules)] * len(target.modules)
    return [Part(module, size) for module, size in zip(target.modules, rows, strict=True)]


def _refuse_idle_stages(spec: ModelSpec, chosen: list[Target]) -> None:
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    per_stage = spec.num_layers // stages
    numbers = {int(target.weight.ours.split(".")[2]) // per_stage for target in chosen}
    idle = set(range(stages)) - numbers
    if idle:
        raise ValueError(
            f"target_modules: none of them is in pipeline stage {min(idle)} of {stages}, which "
            "would have nothing to train; name more layers, or use fewer stages"
        )


def _want_gradient(_: torch.nn.Module, args: object, output: torch.Tensor) -> None:
    if torch.is_grad_enabled():
        output.requires_grad_()
