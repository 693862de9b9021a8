"""Settings of low-rank adapters (LoRA), and which layers of a model can have one.

Knows neither torch nor megatron, so that a wrong setting is refused before anything starts.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from miles_core.config.schema import MilesConfig

ALL_LINEAR = "all-linear"
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LATENT_ATTENTION = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
MODULES = (*ATTENTION, *LATENT_ATTENTION, *MLP)


@dataclass(frozen=True)
class LoraSettings:
    """The adapters: rank r, scale alpha / r, and their layers by the last part of the Hugging Face
    name (none: every linear layer that can have one). `seed` is that of the initial values."""

    rank: int
    alpha: float
    modules: tuple[str, ...] = ()
    seed: int = 0

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def lora_settings(
    rank: int | None, alpha: float | None, modules: Sequence[str], seed: int
) -> LoraSettings | None:
    """From the values of a configuration; None when it asks for no adapters."""
    if rank is None:
        return None
    chosen = () if list(modules) == [ALL_LINEAR] else tuple(modules)
    return LoraSettings(rank, 2.0 * rank if alpha is None else alpha, chosen, seed)


def module_fault(names: Sequence[str], possible: Sequence[str] = MODULES) -> str | None:
    """What is wrong with names of layers, of which a model has `possible` ones, or None."""
    if ALL_LINEAR in names and len(names) > 1:
        return f"{ALL_LINEAR} names every layer already; leave the others out"
    for name in names:
        if name == ALL_LINEAR or name in possible:
            continue
        if name in MODULES:
            known = ", ".join(possible)
            why = (
                "models with experts get adapters in their attention alone"
                if name in MLP
                else "its attention has no such layer"
            )
            return f"{name}: {why}; possible are {known}"
        close = difflib.get_close_matches(name, possible, n=1, cutoff=0.4)
        meant = f"; did you mean {close[0]}?" if close else ""
        return f"{name!r} is none of {ALL_LINEAR}, {', '.join(possible)}{meant}"
    return None


def possible_modules(hf_dir: str | Path) -> tuple[str, ...]:
    """The layers of a Hugging Face model that can have an adapter: those of its attention, and of
    its MLPs unless it has experts. PEFT takes the names of MLP layers for those of all routed
    experts then, also where they are of a dense layer or of a shared expert."""
    config = json.loads((Path(hf_dir) / "config.json").read_text())
    if config.get("kv_lora_rank"):
        queries = LATENT_ATTENTION[:2] if config.get("q_lora_rank") else ("q_proj",)
        attention = (*queries, *LATENT_ATTENTION[2:], "o_proj")
    else:
        attention = ATTENTION
    experts = any(config.get(name) for name in _EXPERTS)
    return attention if experts else (*attention, *MLP)


def lora_errors(config: MilesConfig) -> list[str]:
    """Rules between the settings of adapters and others, as lines for a person."""
    training, errors = config.training, []
    if training.lora_rank is None:
        for name in ("lora_alpha", "target_modules"):
            if getattr(training, name):
                errors.append(
                    f"training.{name}: has no effect without adapters; set --lora-rank too, or "
                    f"leave --{name.replace('_', '-')} out"
                )
        return errors
    fault = module_fault(training.target_modules)
    if fault is not None:
        errors.append(f"training.target_modules: {fault}")
    if "lr" not in training.model_fields_set:
        errors.append(
            f"training.lr: the default {training.lr:g} is for training of all weights and hardly "
            "moves an adapter, which starts at zero; set --lr, usually to 1e-5 up to 1e-4"
        )
    if config.model.ref_load is not None:
        errors.append(
            "model.ref_load: with lora_rank the reference is the policy without its adapter; "
            "leave --ref-load out"
        )
    return errors
